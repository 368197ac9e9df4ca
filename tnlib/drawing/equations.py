"""Equations of diagrams: several of them in a row, with signs between."""

from __future__ import annotations

import re
from typing import Any

from tnlib._errors import ArgumentError
from tnlib.drawing.draw import describe
from tnlib.drawing.graph import Diagram, Leg, join, text
from tnlib.drawing.paint import bubble_padding

_GAP = 0.42  # on either side of a sign
_LETTER = 0.088  # width of a letter on a leg
_SIGN = 0.13  # width of a letter of a sign
_NODE = 0.32  # how far a shape reaches from its middle


def equation(*parts: Any, title: str = "") -> Diagram:
    """Put diagrams in a row: what stands between them are signs, `equation(left, "=", right)`.

    Parameters
    ----------
    parts
        Text for signs ("=", "+", anything matplotlib can write); everything else as `tnlib.draw` takes it.
    title
        Written above.

    Returns
    -------
    Diagram
        For `tnlib.draw`. The parts are as they are alone, but for their titles; the middles of their shapes are on one
        level.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If there is nothing to draw, or there is no picture of a part.

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
        one = text(part, (0.0, 0.0)) if isinstance(part, str) else describe(part)
        left, right = _extent(one)
        heights = [node.position[1] for node in one.nodes]
        level = (min(heights) + max(heights)) / 2
        placed.append(Diagram(one.nodes, one.legs, "", one.bubbles).moved(x - left, -level))
        x += right - left + _GAP
    return join(tuple(placed), title)


def _extent(diagram: Diagram) -> tuple[float, float]:
    """Return the least and the largest x, the room for what is written at the ends of legs included."""
    xs = [diagram.bounds[:2]]
    for node in diagram.nodes:
        half = _NODE if node.kind != "text" else _SIGN / 2 * _letters(node.label)
        xs.append((node.position[0] - half, node.position[0] + half))
    for leg in diagram.legs:
        if leg.end is not None:
            before = (leg.via[-1] if leg.via else diagram.nodes[leg.a].position)[0]
            width, way = _width(leg), leg.end[0] - before
            near, far = (0.5, 0.5) if abs(way) < 0.3 else (0.0, 1.0) if way > 0 else (1.0, 0.0)
            xs.append((leg.end[0] - near * width, leg.end[0] + far * width))
    for bubble in diagram.bubbles:
        pad = bubble_padding(diagram, bubble)
        inside = [diagram.nodes[k].position[0] for k in bubble.nodes]
        xs.append((min(inside) - pad, max(inside) + pad))
    return min(x for x, _ in xs), max(x for _, x in xs)


def _width(leg: Leg) -> float:
    return _LETTER * max(_letters(leg.name), 0 if leg.size is None else len(f"{leg.size:,}")) + 0.06


def _letters(text: str) -> int:
    return max(len(re.sub(r"\\[a-z]+|[${}_^]", "", line, flags=re.IGNORECASE)) for line in text.split("\n"))
