"""Diagram of a Tucker decomposition."""

from __future__ import annotations

from tnlib.drawing.diagram import Diagram, Node
from tnlib.drawing.layout import format_title, star
from tnlib.formats.tucker.format import Tucker


def tucker_diagram(t: Tucker) -> Diagram:
    """Return the core with the factors around it: triangles where their columns are orthonormal."""
    return star(Node("tensor", "core", (0.0, 0.0)), t.factors, t.ranks, "r{}", format_title(t))
