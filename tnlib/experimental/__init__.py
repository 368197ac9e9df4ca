"""What is being tried out: names in here may change or go without notice. A table of contents, loaded when used."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "spectral_reduction": "tnlib.experimental.spectral_radius",
    "SpectralReduction": "tnlib.experimental.spectral_radius",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tnlib.experimental' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
