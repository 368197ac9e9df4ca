"""Glyphs of nodes: circle, square, triangle, diamond, dot, ellipsis, text."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from tnlib.drawing.diagram import Node, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#222222"
BUBBLE_COLOR = "#d6478f"
_RADIUS = 0.27
_FILL = {
    "tensor": "#d9d9d9",
    "matrix": "#d9d9d9",
    "isometry": "#a6cbe8",
    "unitary": "#a6cbe8",
    "weights": "#f5c77e",
    "delta": INK,
    "function": "#f7dbe8",
}


def paint_node(ax: Axes, node: Node) -> None:
    """Paint one node and its label."""
    x, y = node.position
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, "zorder": 5}
    if node.kind == "text":
        ax.text(x, y, node.label, fontsize=10, **style)
    elif node.kind == "ellipsis":
        ax.text(x, y, "· · ·", fontsize=13, fontweight="bold", bbox={"fc": "white", "ec": "none", "pad": 1.0}, **style)
        ax.text(x, y - 0.3, node.label, fontsize=7, **{**style, "va": "top"})
    else:
        ax.add_patch(node_patch(node))
        if node.label:
            letters = len(visible_text(node.label))
            size = 8.0 if letters <= 2 else 7.0 if letters <= 4 else 6.0
            ax.text(*_label_position(node), node.label, fontsize=size, **style)


def node_patch(node: Node) -> Any:
    """Return the matplotlib patch of a node."""
    from matplotlib.patches import Circle, FancyBboxPatch, Polygon

    x, y = node.position
    style: dict[str, Any] = {"fc": _FILL[node.kind], "ec": INK, "lw": 1.0, "zorder": 3}
    if node.kind == "delta":
        return Circle((x, y), 0.085, **style)
    if node.kind == "function":
        style["ec"] = BUBBLE_COLOR
        if node.label in ("", "+"):
            return Circle((x, y), 0.16 if node.label else 0.085, **style | ({} if node.label else {"fc": BUBBLE_COLOR}))
        width = 0.3 + 0.085 * max(len(visible_text(line)) for line in node.label.split("\n"))
        box = "round,pad=0,rounding_size=0.2"
        return FancyBboxPatch((x - width / 2, y - 0.22), width, 0.44, boxstyle=box, **style)
    if node.kind == "tensor":
        return Circle((x, y), _RADIUS, **style)
    if node.kind in ("matrix", "unitary"):
        side = 1.7 * _RADIUS
        box = "round,pad=0,rounding_size=0.04"
        return FancyBboxPatch((x - side / 2, y - side / 2), side, side, boxstyle=box, **style)
    r = 1.15 * _RADIUS
    diamond = [(x + r, y), (x, y + r), (x - r, y), (x, y - r)]
    corners = diamond if node.kind == "weights" else _triangle(node)
    return Polygon(corners, closed=True, joinstyle="round", **style)


def visible_text(label: str) -> str:
    """Return a label without its TeX markup."""
    return re.sub(r"\\[a-z]+|[${}_^]", "", label, flags=re.IGNORECASE)


def _label_position(node: Node) -> Point:
    """Return the centre of a node or, in a triangle, a point nearer to the base."""
    (x, y), (dx, dy) = node.position, node.direction or (0.0, 0.0)
    length = math.hypot(dx, dy) or 1.0
    return x - 0.07 * dx / length, y - 0.07 * dy / length


def _triangle(node: Node) -> list[Point]:
    (x, y), (dx, dy) = node.position, node.direction or (1.0, 0.0)
    tip, r = math.atan2(dy, dx), 1.35 * _RADIUS
    return [(x + r * math.cos(angle), y + r * math.sin(angle)) for angle in (tip, tip + 2.2, tip - 2.2)]
