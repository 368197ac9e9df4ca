"""Diagram of a CP decomposition."""

from __future__ import annotations

from tnlib.drawing.diagram import Diagram, Node
from tnlib.drawing.layout import format_title, star
from tnlib.formats.cp.format import CP


def cp_diagram(t: CP) -> Diagram:
    """Return a copy tensor with the factors and the weights around it."""
    ranks = t.ranks * len(t.factors)
    return star(Node("delta", "", (0.0, 0.0)), t.factors, ranks, "R", format_title(t), weights=True)
