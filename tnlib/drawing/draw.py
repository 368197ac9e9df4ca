"""From a value to its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._fit import Fit
from tnlib._validate import as_array
from tnlib.drawing import chains, networks, stars, terms
from tnlib.drawing.graph import Diagram, join, text
from tnlib.drawing.picture import Picture
from tnlib.formats.cp import CP
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker
from tnlib.formats.vidal import Vidal
from tnlib.network.value import Network

_GAP = 0.9  # between diagrams that stand one below the other


def draw(value: Any) -> Picture:
    """Draw `value` in the graphical notation of Penrose: shapes are tensors, lines their indices.

    Parameters
    ----------
    value
        A format of tnlib, an array, a `TensorNetwork` of quimb or a `Network`, a `Diagram`, anything with a method
        `diagram()` that returns one, or several of these: a list, or a dict from titles to values. They stand one
        below the other, such as a train before and after the steps of a sweep.

    Returns
    -------
    Picture
        With `.figure` (matplotlib), `.save(path)` for SVG and PNG, `.diagram`; notebooks show it. Triangles are
        isometries, as measured, their tips at the smaller leg, which in a train is the side of the centre; blue
        squares unitaries; diamonds singular values and weights; dots copy tensors; circles and squares the rest.
        Lines are as thick as the logarithm of their dimension. Arrows on bonds point to the centre. Of a train of
        more than 30 cores both ends are drawn and what is around the centre.

    Raises
    ------
    ArgumentTypeError
        If there is no picture of such a value.

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
    return Picture(describe(value))


def describe(value: Any) -> Diagram:
    """Return the diagram that `draw` paints."""
    match value:
        case Diagram():
            return value
        case TensorTrain() | TTMatrix():
            return chains.of_train(value)
        case Vidal():
            return chains.of_vidal(value)
        case SVD():
            return stars.of_svd(value)
        case LowRank():
            return stars.of_low_rank(value)
        case Tucker():
            return stars.of_tucker(value)
        case CP():
            return stars.of_cp(value)
        case KroneckerTerms():
            return terms.of_terms(value)
        case Network():
            return networks.of_network(value.tn, value.legs)
        case np.ndarray():
            return stars.of_array(as_array("draw", "value", value))
        case Mapping():
            named = [(str(title), describe(one)) for title, one in value.items()]
            return _column([(f"{title}: {one.title}" if one.title else title, one) for title, one in named])
        case Sequence() if not isinstance(value, str):
            return _column([(one.title, one) for one in map(describe, value)])
    if hasattr(value, "tensor_map"):  # quimb's, known without loading it
        return networks.of_network(value)
    own = getattr(value, "diagram", None)
    if callable(own) and isinstance(found := own(), Diagram):
        return found
    hint = "draw its .value" if isinstance(value, Fit) else "decompose it first, or give it a method diagram()"
    raise ArgumentTypeError(
        f"draw: value must be a format, a network or a Diagram, got {type(value).__name__}; {hint}."
    )


def _column(named: Sequence[tuple[str, Diagram]]) -> Diagram:
    """Put diagrams one below the other, each under its title."""
    if not named:
        raise ArgumentTypeError("draw: value must hold at least one thing to draw, got none; pass a format.")
    parts: list[Diagram] = []
    floor = 0.0
    for title, diagram in named:
        x0, x1, y0, y1 = diagram.bounds
        placed = diagram.moved(-(x0 + x1) / 2, floor - y1)
        heading = text(title, (0.0, floor + 0.75)) if title else None
        parts += [placed] if heading is None else [heading, placed]
        floor += y0 - y1 - _GAP - 0.9 * bool(title)
    return join(tuple(parts))
