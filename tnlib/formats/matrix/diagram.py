"""Diagrams of an SVD, a low-rank product, and a sum of Kronecker products."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tnlib.drawing.diagram import Diagram, Leg, Node
from tnlib.drawing.layout import REACH, STEP, array_node, fan, format_title
from tnlib.formats.matrix.kronecker_terms import KroneckerTerms
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.matrix.svd import SVD


def svd_diagram(t: SVD) -> Diagram:
    """Return U, the singular values and V^H in a row, with the legs of the rows left and of the columns right."""
    left, right = (0.0, 0.0), (2 * STEP, 0.0)
    row_legs = t.left or ()
    column_legs = [k for k in range(len(t.shape)) if k not in row_legs]
    r = len(t.s)
    nodes = (
        array_node("U", t.u, -1, left, (1.0, 0.0)),
        Node("weights", "s", (STEP, 0.0)),
        array_node("V$^H$", t.vh, 0, right, (-1.0, 0.0)),
    )
    bonds = (Leg(0, 1, "r", r, towards=1), Leg(1, 2, "", r, towards=1))
    legs = (*fan(0, row_legs, t.shape, left, math.pi), *bonds, *fan(2, column_legs, t.shape, right, 0.0))
    return Diagram(nodes, legs, format_title(t))


def low_rank_diagram(t: LowRank) -> Diagram:
    """Return the two factors and their bond."""
    nodes = (
        array_node("left", t.left, 1, (0.0, 0.0), (1.0, 0.0)),
        array_node("right", t.right, 0, (STEP, 0.0), (-1.0, 0.0)),
    )
    row, column = _operator_legs(0, (0, 1), t.shape, STEP, 0.0)
    return Diagram(nodes, (row, Leg(0, 1, "r", t.ranks[0]), column), format_title(t))


def kronecker_terms_diagram(t: KroneckerTerms) -> Diagram:
    """Return the left matrices A above the right matrices B, the sum over terms as the bond between them.

    If all right matrices are LowRank, the bond runs through a copy tensor to both of their factors.
    """
    count, *left_shape = t.left.shape
    low_rank = [term for term in t.right if isinstance(term, LowRank)]
    factored = len(low_rank) == count
    width = STEP if factored else 0.0
    nodes = [Node("matrix", "A", (width / 2, 0.0))]
    legs = [Leg(0, 1, "term", count), *_operator_legs(0, (0, 0), left_shape, width, 0.0)]
    if factored:
        nodes += [
            Node("delta", "", (width / 2, -0.85)),
            Node("matrix", "left", (0.0, -2.0)),
            Node("matrix", "right", (width, -2.0)),
        ]
        rank = max(term.ranks[0] for term in low_rank)
        row, column = _operator_legs(1, (2, 3), t.right[0].shape, width, -2.0)
        legs += [Leg(1, 2, "", count), Leg(1, 3, "", count), row, Leg(2, 3, "r", rank), column]
    else:
        nodes.append(Node("matrix", "B", (0.0, -1.6)))
        legs += _operator_legs(1, (1, 1), t.right[0].shape, width, -1.6)
    title = f"KroneckerTerms, sum of {count} A $\\otimes$ B, {t.shape[0]} x {t.shape[1]}"
    return Diagram(tuple(nodes), tuple(legs), title)


def _operator_legs(k: int, nodes: tuple[int, int], shape: Sequence[int], width: float, y: float) -> list[Leg]:
    """Return the open legs of a matrix at height y: row leg k on the left, column leg k on the right of its nodes."""
    row, column = nodes
    return [
        Leg(row, None, f"k{k}", shape[0], (-REACH, y)),
        Leg(column, None, f"b{k}", shape[1], (width + REACH, y)),
    ]
