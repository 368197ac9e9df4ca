"""Diagrams: a table of contents, loaded when it is used. `tnlib.draw` is the function that draws."""

from __future__ import annotations

from tnlib._lazy import contents

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

__getattr__, __dir__, __all__ = contents(__name__, _HOME)
