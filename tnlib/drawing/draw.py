"""Draw formats, arrays, networks and diagrams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._fit import Fit, refuse_other_arrays, shorten
from tnlib._registry import implementation
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.drawing.diagram import Diagram, Node, join, text
from tnlib.drawing.layout import circle_angle, fan
from tnlib.drawing.node_kinds import plain_kind
from tnlib.drawing.picture import Picture

_GAP = 0.9  # between diagrams in a column


def draw(value: Any) -> Picture:
    """Draw `value` in Penrose's graphical notation: shapes are tensors, lines their indices.

    Parameters
    ----------
    value
        A format of tnlib, an array, a `TensorNetwork` of quimb or a `Network`, a `Diagram`, any object with a method
        `diagram()` that returns one, or a list of these or a dict from titles to these, drawn in a column: for example
        a train before and after rounding, or the steps of a sweep.

    Returns
    -------
    Picture
        With `.figure` (matplotlib), `.save(path)` for SVG and PNG, and `.diagram`; notebooks show it. Triangles are
        isometries, measured from the arrays, with the tip at the smaller leg; blue squares unitaries; diamonds singular
        values and weights; dots copy tensors; circles and squares other tensors. The line width grows with the
        logarithm of the dimension. Arrows on bonds point to the centre of a train; of more than 30 cores, both ends and
        the neighbours of the centre are drawn.

    References
    ----------
    R. Penrose, "Applications of negative dimensional tensors", Combinatorial Mathematics and its Applications (1971).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> picture = tnlib.draw(tnlib.svd(np.diag([3.0, 4.0, 0.0])).value)
    >>> [node.kind for node in picture.diagram.nodes], picture.diagram.open_legs
    (['isometry', 'weights', 'isometry'], (('k0', 3), ('k1', 3)))
    """
    return Picture(as_diagram(value))


def as_diagram(value: Any) -> Diagram:
    """Return the diagram that `draw` paints."""
    if isinstance(value, Diagram):
        return value
    refuse_other_arrays("draw", "value", value)
    if (format_diagram := implementation("diagram", type(value))) is not None:
        diagram: Diagram = format_diagram(value)
        return diagram
    if isinstance(value, np.ndarray):
        return _array_diagram(as_array("draw", "value", value))
    if isinstance(value, Mapping):
        return _column([(str(title), as_diagram(item)) for title, item in value.items()])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _column([("", as_diagram(item)) for item in value])
    method = getattr(value, "diagram", None)
    if callable(method) and isinstance(diagram := method(), Diagram):
        return diagram
    advice = "draw its .value" if isinstance(value, Fit) else "decompose it first, or give it a method diagram()"
    raise ArgumentTypeError(
        f"draw: value must be a format, a network or a Diagram, got {type(value).__name__}; {advice}."
    )


def _array_diagram(a: Array) -> Diagram:
    """Return one node with its open legs: those of a matrix left and right, others on a circle."""
    ndim, origin = a.ndim, (0.0, 0.0)
    angles = [math.pi, 0.0] if ndim == 2 else [circle_angle(k, ndim) for k in range(ndim)]
    legs = [leg for k in range(ndim) for leg in fan(0, (k,), a.shape, origin, angles[k])]
    return Diagram((Node(plain_kind(ndim), "", origin),), tuple(legs), f"{shorten(a.shape, ' x ')}, dense")


def _column(named: Sequence[tuple[str, Diagram]]) -> Diagram:
    """Return diagrams one below the other, each with its name and its own title as a heading."""
    if not named:
        raise ArgumentTypeError("draw: value must hold at least one value to draw, got none; pass a format.")
    parts: list[Diagram] = []
    top = 0.0
    for name, diagram in named:
        x0, x1, y0, y1 = diagram.bounds
        heading = ": ".join(words for words in (name, diagram.title) if words)
        if heading:
            parts.append(text(heading, (0.0, top + 0.75)))
        parts.append(diagram.moved(-(x0 + x1) / 2, top - y1))
        top += y0 - y1 - _GAP - 0.9 * bool(heading)
    return join(tuple(parts))
