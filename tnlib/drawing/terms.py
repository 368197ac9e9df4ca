"""The diagram of a sum of Kronecker products."""

from __future__ import annotations

from tnlib.drawing.graph import Diagram, Leg, Node
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.low_rank import LowRank

_STEP = 1.5
_REACH = 1.0


def of_terms(value: KroneckerTerms) -> Diagram:
    """Describe a sum over terms as one bond: the matrices on the positions above, those on the features below.

    Where the right matrices are all held as factors, the bond runs through a copy tensor to both of them.
    """
    count, p, p_in = value.left.shape
    q, q_in = value.right[0].shape
    low = [term for term in value.right if isinstance(term, LowRank)]
    factored = len(low) == count
    width = _STEP if factored else 0.0
    middle = width / 2
    nodes = [Node("matrix", "A", (middle, 0.0))]
    ends = (-_REACH, width + _REACH)
    legs = [
        Leg(0, None, "k0", p, (ends[0], 0.0)),
        Leg(0, None, "b0", p_in, (ends[1], 0.0)),
    ]
    if factored:
        rank = max(term.ranks[0] for term in low)
        nodes += [
            Node("delta", "", (middle, -0.85)),
            Node("matrix", "left", (0.0, -2.0)),
            Node("matrix", "right", (width, -2.0)),
        ]
        legs += [
            Leg(0, 1, "term", count),
            Leg(1, 2, "", count),
            Leg(1, 3, "", count),
            Leg(2, 3, "r", rank),
            Leg(2, None, "k1", q, (ends[0], -2.0)),
            Leg(3, None, "b1", q_in, (ends[1], -2.0)),
        ]
    else:
        nodes.append(Node("matrix", "B", (0.0, -1.6)))
        legs += [
            Leg(0, 1, "term", count),
            Leg(1, None, "k1", q, (ends[0], -1.6)),
            Leg(1, None, "b1", q_in, (ends[1], -1.6)),
        ]
    title = f"KroneckerTerms, sum of {count} A $\\otimes$ B, {value.shape[0]} x {value.shape[1]}"
    return Diagram(tuple(nodes), tuple(legs), title)
