"""Module names of version 0.1: the public names in them are taken from the package that has them now."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGES = {
    "tnlib": (
        *("decompose", *(f"decompose.{name}" for name in ("cp", "svd", "tt_cross", "tt_svd", "tucker"))),
        *(f"formats.{name}" for name in ("kronecker", "low_rank", "svd", "vidal")),
        *(f"ops.{name}" for name in ("apply", "balance", "canonicalize", "degenerate", "join", "match")),
        *(f"ops.{name}" for name in ("round_randomized", "schmidt")),
    ),
    "tnlib.drawing": ("drawing.graph", "drawing.steps"),
    "tnlib.interop.quimb": tuple(
        f"network.{name}"
        for name in (
            "build",
            "contraction",
            "copies",
            "cost",
            "hole",
            "loops",
            "recognise",
            "special",
            "trees",
            "value",
        )
    ),
}
MOVED = {f"tnlib.{old}": package for package, modules in PACKAGES.items() for old in modules}


class _OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module without code of its own for every old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]

        def load(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {old!r} has no attribute {name!r}")
            value = getattr(importlib.import_module(new), name)
            warnings.warn(f"{old}.{name} is deprecated; use {new}.{name} instead.", DeprecationWarning, stacklevel=2)
            return value

        vars(module)["__getattr__"] = load


def install() -> None:
    """Let the import system find modules by their old names."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
