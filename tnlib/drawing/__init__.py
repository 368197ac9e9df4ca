"""Diagrams: a table of contents, loaded when it is used. `tnlib.draw` is the function that draws."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Node": "tnlib.drawing.graph",
    "Leg": "tnlib.drawing.graph",
    "Bubble": "tnlib.drawing.graph",
    "Diagram": "tnlib.drawing.graph",
    "join": "tnlib.drawing.graph",
    "sweep_steps": "tnlib.drawing.steps",
    "einsum_diagram": "tnlib.drawing.einsums",
    "equation": "tnlib.drawing.equations",
    "Picture": "tnlib.drawing.picture",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tnlib.drawing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
