"""Deprecated alias: the spectral radius reduction is `tnlib_adapters.circuits.spectral_reduction`."""

from __future__ import annotations

from tnlib._deprecation import deprecated_module

__all__ = ["SpectralReduction", "spectral_reduction"]  # noqa: F822
__getattr__ = deprecated_module("tnlib.experimental", "tnlib_adapters.circuits")


def __dir__() -> list[str]:
    return sorted(__all__)


__path__: list[str] = []  # so that the import system looks for its old modules
