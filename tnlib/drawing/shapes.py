"""The shapes of nodes: what a tensor is, one sees."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tnlib.drawing.graph import Node, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#222222"
_RADIUS = 0.27
_FILL = {
    "tensor": "#d9d9d9",
    "matrix": "#d9d9d9",
    "isometry": "#a6cbe8",
    "unitary": "#a6cbe8",
    "weights": "#f5c77e",
    "delta": INK,
}


def paint_node(ax: Axes, node: Node) -> None:
    """Paint one node and what is written on it."""
    x, y = node.position
    if node.kind == "text":
        ax.text(x, y, node.label, ha="center", va="center", fontsize=10, color=INK, zorder=5)
        return
    if node.kind == "ellipsis":
        ax.text(
            x,
            y,
            "· · ·",
            ha="center",
            va="center",
            fontsize=13,
            color=INK,
            zorder=5,
            fontweight="bold",
            bbox={"fc": "white", "ec": "none", "pad": 1.0},
        )
        ax.text(x, y - 0.3, node.label, ha="center", va="top", fontsize=7, color=INK, zorder=5)
        return
    ax.add_patch(shape_of(node))
    if node.label:
        ax.text(*_middle(node), node.label, ha="center", va="center", fontsize=_font(node), color=INK, zorder=5)


def _font(node: Node) -> float:
    letters = len(re.sub(r"\\[a-z]+|[${}_^]", "", node.label, flags=re.IGNORECASE))
    return 8.0 if letters <= 2 else 7.0 if letters <= 4 else 6.0


def _middle(node: Node) -> Point:
    """Return where the label stands: of a triangle nearer to its base."""
    (x, y), (dx, dy) = node.position, node.direction or (0.0, 0.0)
    length = math.hypot(dx, dy) or 1.0
    return x - 0.07 * dx / length, y - 0.07 * dy / length


def shape_of(node: Node) -> Any:
    """Return the patch of a node."""
    from matplotlib.patches import Circle, FancyBboxPatch, Polygon

    (x, y), r = node.position, _RADIUS
    style: dict[str, Any] = {"fc": _FILL[node.kind], "ec": INK, "lw": 1.0, "zorder": 3}
    if node.kind == "delta":
        return Circle((x, y), 0.085, **style)
    if node.kind == "tensor":
        return Circle((x, y), r, **style)
    if node.kind in ("matrix", "unitary"):
        side = 1.7 * r
        box = "round,pad=0,rounding_size=0.04"
        return FancyBboxPatch((x - side / 2, y - side / 2), side, side, boxstyle=box, **style)
    corners = _diamond(x, y) if node.kind == "weights" else _triangle(node)
    return Polygon(list(corners), closed=True, joinstyle="round", **style)


def _diamond(x: float, y: float) -> Iterator[Point]:
    r = 1.15 * _RADIUS
    yield from ((x + r, y), (x, y + r), (x - r, y), (x, y - r))


def _triangle(node: Node) -> Iterator[Point]:
    (x, y), (dx, dy) = node.position, node.direction or (1.0, 0.0)
    turn, r = math.atan2(dy, dx), 1.35 * _RADIUS
    for corner, far in ((0.0, 1.0), (2.2, 1.0), (-2.2, 1.0)):
        yield x + far * r * math.cos(turn + corner), y + far * r * math.sin(turn + corner)
