"""Tables of contents of packages: public names that are loaded when they are first used (SPEC 1)."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

Contents = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def contents(package: str, home: dict[str, str], parts: tuple[str, ...] = ()) -> Contents:
    """Return `__getattr__`, `__dir__` and `__all__` of a package from {public name: module that defines it}.

    `parts` are the packages inside it that have such a table of their own.
    """
    return functools.partial(load, package, home, parts), lambda: sorted([*home, *parts]), list(home)


def load(package: str, home: dict[str, str], parts: tuple[str, ...], name: str) -> Any:
    """Return what `package` calls `name`, and let it be found there from now on."""
    if name in parts:
        return importlib.import_module(f"{package}.{name}")
    if name not in home:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home[name]), name)
    setattr(sys.modules[package], name, value)
    return value
