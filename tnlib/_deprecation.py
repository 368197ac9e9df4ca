"""Old names that keep working with a DeprecationWarning: keyword arguments, functions, classes and modules."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from tnlib._errors import ArgumentTypeError

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that accepts old keywords: `renamed_arguments(value="t")` passes `value=` on as `t=`.

    Both names at once, or the old one beside a positional argument, raise as a repeated argument does.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in new_names.keys() & kwargs.keys():
                new = new_names[old]
                if new in kwargs:
                    raise ArgumentTypeError(
                        f"{function.__name__}: {new} must be passed once, got {old}= and {new}=; drop {old}=."
                    )
                text = f"{function.__name__}: {old}= is deprecated; use {new}= instead."
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return run

    return decorate


def deprecated_module(old: str, new: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` that forwards every name of the module `old` to the module `new`.

    >>> __getattr__ = deprecated_module("tnlib.network", "tnlib.interop.quimb")
    """

    def load(name: str) -> Any:
        if name.startswith("__"):  # for the import system and for inspection
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(f"{old}.{name} is deprecated; use {new}.{name} instead.", DeprecationWarning, stacklevel=2)
        return value

    return load


def renamed_names(module: str, new_names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module `__getattr__` that forwards old names of functions and classes of `module` to new ones.

    >>> __getattr__ = renamed_names(__name__, {"Features": "SingularVectors"})
    """

    def load(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = new_names[name]
        warnings.warn(f"{module}.{name} is deprecated; use {module}.{new} instead.", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new)

    return load


def alias_old_modules(new_names: Mapping[str, str]) -> None:
    """Let the import system find modules by their old names: {old: new}, names in them forwarded with a warning."""
    sys.meta_path.insert(0, _OldModules(new_names))  # before folders that an older installation left behind


class _OldModules:
    """Finder and loader of old modules, each without code of its own (importlib.abc takes 20 ms to import)."""

    def __init__(self, new_names: Mapping[str, str]) -> None:
        self.new_names = new_names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an old module; a package, because it may have had modules."""
        loader: Any = self
        known = fullname in self.new_names
        return importlib.machinery.ModuleSpec(fullname, loader, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave it to the import system to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the new module, for what that registers, and forward names to it."""
        new = self.new_names[module.__name__]
        importlib.import_module(new)
        warnings.warn(f"{module.__name__} is deprecated; import {new} instead.", DeprecationWarning, stacklevel=2)
        vars(module)["__getattr__"] = deprecated_module(module.__name__, new)
