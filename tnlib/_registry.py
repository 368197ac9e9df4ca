"""Registry of formats: the functions that implement a verb, such as `round` or `inner`, for each format.

The folder of a format registers its implementations in `__init__.py`, as "module:function" so that nothing is imported
before it is used. `register` accepts classes and functions as well, for formats defined outside tnlib.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeAlias

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import refuse_other_arrays, wrong_type

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

_ANY_LIBRARY = {"round", "inner"}  # whose implementations take arrays of other libraries, where a format may hold them

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
        keys = (_key(base) for base in kind.__mro__)
        reference = next((_VERBS[key][verb] for key in keys if verb in _VERBS.get(key, {})), None)
        _LOOKUPS[verb, kind] = None if reference is None else _resolve(reference)
    return _LOOKUPS[verb, kind]


def require(function: str, verb: str, parameter: str, value: object, advice: str) -> Implementation:
    """Return the implementation of `verb` for `value`, or raise with a list of the formats that have one."""
    target = implementation(verb, type(value))
    if verb not in _ANY_LIBRARY:
        refuse_other_arrays(function, parameter, value)
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
