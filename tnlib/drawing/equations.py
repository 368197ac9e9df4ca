"""Equations: diagrams in a row, with signs between them."""

from __future__ import annotations

from typing import Any

from tnlib._errors import ArgumentError
from tnlib.drawing.diagram import Diagram, join, text
from tnlib.drawing.draw import as_diagram
from tnlib.drawing.glyphs import visible_text
from tnlib.drawing.paint import bubble_padding

_GAP = 0.42  # on either side of a sign
_LEG_LETTER = 0.088  # width of a letter on a leg
_SIGN_LETTER = 0.13  # width of a letter of a sign
_NODE_RADIUS = 0.32


def equation(*parts: Any, title: str = "") -> Diagram:
    """Return a diagram of values in a row with signs between them: `equation(left, "=", right)`.

    Each part is drawn as by `tnlib.draw`, without its title, vertically centred.

    Parameters
    ----------
    parts
        Strings for signs ("=", "+", any text that matplotlib renders), and values that `tnlib.draw` accepts.
    title
        Text above the equation.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> x = np.arange(6.0).reshape(2, 3)
    >>> [node.label for node in equation(x, "=", tnlib.svd(x).value).nodes]
    ['', '=', 'U', 's', 'V$^H$']
    """
    if all(isinstance(part, str) for part in parts):
        raise ArgumentError(f"equation: parts must hold at least one value to draw, got {len(parts)} signs; add one.")
    placed: list[Diagram] = []
    x = 0.0
    for part in parts:
        diagram = text(part, (0.0, 0.0)) if isinstance(part, str) else as_diagram(part)
        left, right = _extent(diagram)
        heights = [node.position[1] for node in diagram.nodes] or [0.0]
        placed.append(diagram.moved(x - left, -(min(heights) + max(heights)) / 2))
        x += right - left + _GAP
    return join(tuple(placed), title)


def _extent(diagram: Diagram) -> tuple[float, float]:
    """Return the smallest and largest x, including the text at the ends of open legs."""
    spans = [diagram.bounds[:2]]
    for node in diagram.nodes:
        radius = _NODE_RADIUS if node.kind != "text" else _SIGN_LETTER / 2 * _count_letters(node.label)
        spans.append((node.position[0] - radius, node.position[0] + radius))
    for leg in diagram.legs:
        if leg.end is not None:
            width = _LEG_LETTER * max(_count_letters(leg.name), len(leg.size_text)) + 0.06
            dx = leg.end[0] - (leg.via[-1] if leg.via else diagram.nodes[leg.a].position)[0]
            before, behind = (0.5, 0.5) if abs(dx) < 0.3 else (0.0, 1.0) if dx > 0 else (1.0, 0.0)
            spans.append((leg.end[0] - before * width, leg.end[0] + behind * width))
    for bubble in diagram.bubbles:
        padding = bubble_padding(diagram, bubble)
        inside = [diagram.nodes[k].position[0] for k in bubble.nodes]
        spans.append((min(inside) - padding, max(inside) + padding))
    return min(left for left, _ in spans), max(right for _, right in spans)


def _count_letters(label: str) -> int:
    return max(len(line) for line in visible_text(label).split("\n"))
