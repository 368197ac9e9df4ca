"""Deprecated alias of `tnlib.interop.quimb`."""

from __future__ import annotations

from tnlib._deprecation import deprecated_module
from tnlib.interop.quimb import __all__ as __all__

__getattr__ = deprecated_module("tnlib.network", "tnlib.interop.quimb")


def __dir__() -> list[str]:
    return sorted(__all__)


__path__: list[str] = []  # so that the import system looks for its old modules
