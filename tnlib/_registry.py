"""Registry of formats: the functions that implement a verb, such as `round` or `inner`, for each format.

The folder of a format registers its implementations in `__init__.py`, as "module:function" so that nothing is imported
before it is used. `register` accepts classes and functions as well, for formats defined outside tnlib.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import wrong_type

Implementation: TypeAlias = Callable[..., Any]
Reference: TypeAlias = str | Implementation  # "module:name", or the object itself

# Packages that register formats. Importing one of them costs nothing but its entries here.
_PROVIDERS = (
    "tnlib.formats.train",
    "tnlib.formats.tucker",
    "tnlib.formats.cp",
    "tnlib.formats.matrix",
    "tnlib.interop.quimb",
)

# Verbs that the functions of tnlib look up, beside conversions to_<Class>.
VERBS = {"round", "inner", "kron", "outer", "entries", "contract_vectors", "canonical_form", "diagram"}
VERBS |= {"schmidt_values", "ttm_svd"}  # of KroneckerTerms
VERBS |= {"other_arrays"}  # the subclass of a format that holds arrays of other libraries

_FUNCTIONS = {"diagram": "draw", "contract_vectors": "contract"}  # public functions named otherwise than their verb

_VERBS: dict[str, dict[str, Reference]] = {}  # class -> verb -> implementation
_CLASSES: dict[str, str | type] = {}  # name of a class -> class
_LOOKUPS: dict[tuple[str, type], Implementation | None] = {}  # earlier results of `implementation`


def register(kind: type | str, **verbs: Reference) -> None:
    """Register implementations of verbs for a class of formats.

    Parameters
    ----------
    kind
        The class, or "module:Class", which is imported when it is needed. Subclasses inherit its implementations.
    **verbs
        Functions, or "module:function", by the names of the public functions (round, inner, kron, ...), `diagram` for
        `tnlib.draw`, and `to_<Class>` for conversions. They are called with the validated arguments.

    Examples
    --------
    >>> class Segment(float):
    ...     pass
    >>> register(Segment, inner=lambda a, b: a * b)
    >>> implementation("inner", Segment)(Segment(1.5), Segment(2.0))
    3.0
    """
    if unknown := [verb for verb in verbs if verb not in VERBS and not verb.startswith("to_")]:
        raise ArgumentError(
            f"register: a verb must be to_<Class> or one of {', '.join(sorted(VERBS))}, got {unknown[0]}; correct it."
        )
    if isinstance(kind, type):
        _load_providers()  # whose names are taken
    elif not isinstance(kind, str):
        raise ArgumentTypeError(
            f"register: kind must be a class or 'module:Class', got {kind!r}; pass the class itself."
        )
    key = kind if isinstance(kind, str) else _key(kind)
    name = _class_name(key)
    other = _CLASSES.get(name, key)
    if (other if isinstance(other, str) else _key(other)) != key:
        raise ArgumentError(f"register: kind must have a name of its own, got a second {name}; rename the class.")
    _CLASSES[name] = kind
    _VERBS.setdefault(key, {}).update(verbs)
    _LOOKUPS.clear()


def implementation(verb: str, kind: type) -> Implementation | None:
    """Return the implementation of `verb` for `kind` or its nearest base class, None where there is none."""
    if (verb, kind) not in _LOOKUPS:
        _load_providers()
        if (own := getattr(kind, "verbs", None)) is not None:  # of arrays of other libraries
            return _own_implementation(verb, kind, own)
        keys = (_key(base) for base in kind.__mro__)
        reference = next((_VERBS[key][verb] for key in keys if verb in _VERBS.get(key, {})), None)
        _LOOKUPS[verb, kind] = None if reference is None else _resolve(reference)
    return _LOOKUPS[verb, kind]


def _own_implementation(verb: str, kind: Any, verbs: Mapping[str, Implementation]) -> Implementation:
    """Return the implementation of a class that inherits none, or refuse with the name of the public function."""
    if verb not in verbs:
        function = "convert" if verb.startswith("to_") else _FUNCTIONS.get(verb, verb)
        raise ArgumentTypeError(
            f"{function}: a {kind.numpy_class.__name__} must hold numpy arrays, got those of another library; "
            "pass value.to_numpy()."
        )
    return verbs[verb]


def require(function: str, verb: str, parameter: str, value: object, advice: str) -> Implementation:
    """Return the implementation of `verb` for `value`, or raise with a list of the formats that have one."""
    target = implementation(verb, type(value))
    if target is None:
        raise wrong_type(function, parameter, list_formats(verb), value, advice)
    return target


def list_formats(verb: str) -> str:
    """Return "a TensorTrain, Tucker or CP": the formats that implement `verb`, those of tnlib first."""
    _load_providers()
    keys = sorted((key for key, verbs in _VERBS.items() if verb in verbs), key=_provider_number)
    *names, last = [_class_name(key) for key in keys] or ["format"]
    return f"a {', '.join(names)} or {last}" if names else f"a {last}"


def format_class(name: str) -> Any:
    """Return the registered class of this name, None where there is none."""
    _load_providers()
    return _resolve(_CLASSES[name]) if name in _CLASSES else None


def _load_providers() -> None:
    for package in _PROVIDERS:
        importlib.import_module(package)


def _provider_number(key: str) -> int:
    return next((k for k, package in enumerate(_PROVIDERS) if key.startswith(package)), len(_PROVIDERS))


def _key(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_name(key: str) -> str:
    return key.rpartition(":")[2].rpartition(".")[2]


def _resolve(reference: Reference) -> Any:
    return pkgutil.resolve_name(reference) if isinstance(reference, str) else reference
