"""Paint diagrams with matplotlib."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tnlib._typing import Array
from tnlib.drawing.diagram import Bubble, Diagram, Leg, Node, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Limits: TypeAlias = tuple[float, float, float, float]  # x0, x1, y0, y1

INK = "#222222"
BUBBLE_COLOR = "#d6478f"
_RADIUS = 0.27
_LABEL_SIZE = 9.0  # points, which is 12 pixels on a web page: smaller letters are hard to read on a screen
_FILL = {
    "tensor": "#d9d9d9",
    "matrix": "#d9d9d9",
    "isometry": "#a6cbe8",
    "unitary": "#a6cbe8",
    "weights": "#f5c77e",
    "delta": INK,
    "function": "#f7dbe8",
}
_INCHES = 0.87  # length of a unit of a diagram, in which labels of that size fit into nodes and between them
_MARGIN = 0.45
_CORNER_RADIUS = 0.18  # of bonds that turn
_PLACES = (0.5, 0.62, 0.38, 0.74, 0.26)  # of a label along a bond, the best first
_ENOUGH_ROOM = 0.4  # of a label from the centres of nodes and from other labels
_RIM_DISTANCE = 0.28  # of a label from the rim of a bubble: half of a short word
_LEGEND = {
    "isometry": "isometry, tip to the smaller leg",
    "unitary": "unitary",
    "weights": "diagonal",
    "delta": "copy tensor",
    "function": "function, sum or copy of an array",
}


@dataclass
class _Occupied:
    """Places where a label of a bond would not be legible."""

    points: list[Point]  # centres of nodes, and labels
    rims: list[Limits]  # of bubbles

    def room_at(self, place: Array) -> float:
        """Return the distance to the nearest of the points, 0 on a rim."""
        x, y = map(float, place)
        on_rim = any(
            (min(abs(x - x0), abs(x - x1)) < _RIM_DISTANCE and y0 < y < y1)
            or (min(abs(y - y0), abs(y - y1)) < _RIM_DISTANCE and x0 < x < x1)
            for x0, x1, y0, y1 in self.rims
        )
        return 0.0 if on_rim else min(math.dist((x, y), other) for other in self.points)


def paint(diagram: Diagram) -> Figure:
    """Return a figure of the size that the diagram needs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=150)
    FigureCanvasAgg(figure)  # measures text
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_axis_off()
    x0, x1, y0, y1 = diagram.bounds
    margin = max((0.1 + bubble_padding(diagram, bubble) for bubble in diagram.bubbles), default=_MARGIN)
    _resize(figure, ax, (x0 - margin, x1 + margin, y0 - margin, y1 + margin))
    for bubble in sorted(diagram.bubbles, key=lambda b: -len(b.nodes)):
        _paint_bubble(ax, diagram, bubble)
    occupied = _Occupied([node.position for node in diagram.nodes], [_rim(diagram, b) for b in diagram.bubbles])
    for leg, bend in zip(diagram.legs, _bends(diagram), strict=True):
        _paint_leg(ax, diagram, leg, bend, occupied)
    for node in diagram.nodes:
        paint_node(ax, node)
    x0, x1, y0, y1 = _resize(figure, ax, _limits_around_text(ax, 0.12))
    if diagram.title:
        ax.text((x0 + x1) / 2, y1 + 0.15, diagram.title, ha="center", va="bottom", fontsize=_LABEL_SIZE, color=INK)
    left = _paint_legend(ax, diagram, (x0 + x1) / 2, y0 - 0.2)
    x0, x1, y0, y1 = _limits_around_text(ax, 0.14)
    _resize(figure, ax, (min(x0, left), x1, y0, y1))
    return figure


def thickness(size: int | None) -> float:
    """Return the width of a line in points: it grows with the logarithm of the dimension."""
    return 1.0 if size is None else 0.7 + 0.45 * math.log2(size)


def bubble_padding(diagram: Diagram, bubble: Bubble) -> float:
    """Return the distance from the centres of the nodes to the rim of a bubble; it grows with nested bubbles."""
    return 0.62 + 0.22 * sum(set(other.nodes) < set(bubble.nodes) for other in diagram.bubbles)


def _resize(figure: Figure, ax: Axes, limits: Limits) -> Limits:
    """Set the limits, and the size of the figure in proportion."""
    x0, x1, y0, y1 = limits
    figure.set_size_inches(_INCHES * (x1 - x0), _INCHES * (y1 - y0))
    ax.set(xlim=(x0, x1), ylim=(y0, y1))
    return limits


def _limits_around_text(ax: Axes, margin: float) -> Limits:
    """Return the limits that leave this margin around every text."""
    (x0, x1), (y0, y1) = ax.get_xlim(), ax.get_ylim()
    to_data = ax.transData.inverted()
    for text in ax.texts:
        (left, low), (right, high) = to_data.transform(text.get_window_extent().get_points())
        x0, x1 = min(x0, left - margin), max(x1, right + margin)
        y0, y1 = min(y0, low - margin), max(y1, high + margin)
    return float(x0), float(x1), float(y0), float(y1)


def _bends(diagram: Diagram) -> list[float]:
    """Return the deviation of each leg from a straight line, which separates several bonds between two nodes."""
    parallel: dict[frozenset[int], list[int]] = {}
    for k, leg in enumerate(diagram.legs):
        if leg.b is not None and not leg.via:
            parallel.setdefault(frozenset((leg.a, leg.b)), []).append(k)
    bends = [0.0] * len(diagram.legs)
    for legs in parallel.values():
        for j, k in enumerate(legs):
            side = 1 if diagram.legs[k].a == min(diagram.legs[k].a, diagram.legs[k].b or 0) else -1
            bends[k] = side * 0.45 * (j - (len(legs) - 1) / 2)
    return bends


def _paint_leg(ax: Axes, diagram: Diagram, leg: Leg, bend: float, occupied: _Occupied) -> None:
    """Paint a leg and its labels; the place of the label of a straight bond is entered in `occupied`."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    start = diagram.nodes[leg.a].position
    stop = diagram.nodes[leg.b].position if leg.b is not None else leg.end
    points = np.array([start, *leg.via, stop], dtype=float)
    if bend:
        a, b = points
        middle = (a + b) / 2 + 2 * bend * _normal(a, b)
        vertices, codes = np.array([a, middle, b]), [Path.MOVETO, Path.CURVE3, Path.CURVE3]
    else:
        vertices, codes = _rounded_path(points)
    # A text node has no shape that would cover the ends of its lines: they must overlap.
    at_text = any(k is not None and diagram.nodes[k].kind == "text" for k in (leg.a, leg.b))
    cap = "projecting" if at_text else "butt"
    width = thickness(leg.size)
    ax.add_patch(PathPatch(Path(vertices, codes), fill=False, lw=width, ec="#555555", capstyle=cap, zorder=1))
    if leg.towards is not None:
        _paint_arrow(ax, leg, points, bend)
    if leg.b is None:
        _write_open_leg(ax, leg, points)
    else:
        _write_bond(ax, leg, points, bend, occupied)


def _rounded_path(points: Array) -> tuple[Array, list[Any]]:
    """Return vertices and codes of a path through the points (n, 2) with rounded corners."""
    from matplotlib.path import Path

    vertices, codes = [points[0]], [Path.MOVETO]
    for before, corner, behind in zip(points, points[1:], points[2:], strict=False):
        near, far = (
            corner + (other - corner) * min(0.5, _CORNER_RADIUS / (math.dist(corner, other) or math.inf))
            for other in (before, behind)
        )
        vertices += [near, corner, far]
        codes += [Path.LINETO, Path.CURVE3, Path.CURVE3]
    return np.array([*vertices, points[-1]]), [*codes, Path.LINETO]


def _direction(a: Array, b: Array) -> Array:
    """Return the unit vector (2,) from a to b, zero if they coincide."""
    return np.asarray((b - a) / (math.dist(a, b) or 1.0))


def _normal(a: Array, b: Array) -> Array:
    """Return the unit normal (2,) of a line, the upward one or, of a vertical line, the one to the right."""
    dx, dy = _direction(a, b)
    normal = np.array([-dy, dx])
    return normal if normal[1] > 0 or (normal[1] == 0 and normal[0] > 0) else -normal


def _longest_segment(points: Array) -> tuple[Array, Array]:
    """Return the ends of the longest segment of a line."""
    k = int(np.argmax(np.hypot(*(points[1:] - points[:-1]).T)))
    return points[k], points[k + 1]


def _paint_arrow(ax: Axes, leg: Leg, points: Array, bend: float) -> None:
    a, b = _longest_segment(points)
    forward = _direction(a, b) * (1 if leg.towards == leg.b else -1)
    across = np.array([-forward[1], forward[0]])
    size = 0.065 + 0.012 * thickness(leg.size)
    tip = (a + b) / 2 + bend * _normal(a, b) + size * forward
    corners = [tip, tip - 2 * size * forward + size * across, tip - 2 * size * forward - size * across]
    ax.fill(*np.array(corners).T, color="#1f6fb2", zorder=2, lw=0)


def _write_open_leg(ax: Axes, leg: Leg, points: Array) -> None:
    """Write name and dimension at the end of an open leg."""
    x, y = _direction(points[-2], points[-1])
    ha = "center" if abs(x) < 0.4 else "left" if x > 0 else "right"
    va = "center" if abs(y) < 0.4 else "bottom" if y > 0 else "top"
    text = _name_and_size(leg, "\n" if abs(x) < 0.4 or abs(y) < 0.4 else " ")
    end = points[-1] + 0.06 * np.array([x, y])
    _write(ax, end, text, ha=ha, va=va, fontsize=_LABEL_SIZE, color=INK, linespacing=1.05, zorder=4)


def _write_bond(ax: Axes, leg: Leg, points: Array, bend: float, occupied: _Occupied) -> None:
    """Write name and dimension beside the middle of a bond or, if that place is occupied, beside another point."""
    a, b = _longest_segment(points)
    normal = _normal(a, b)
    middle = (a + b) / 2 + bend * normal
    if not bend and not leg.via and _name_and_size(leg, ""):
        places = [a + t * (b - a) for t in _PLACES]
        middle = max(places, key=lambda place: min(occupied.room_at(place), _ENOUGH_ROOM))  # the first of the best
        occupied.points.append((float(middle[0]), float(middle[1])))
    gap = (0.07 + 0.006 * thickness(leg.size)) * normal
    if leg.towards is not None:
        gap = gap + 0.05 * normal
    style: dict[str, Any] = {"fontsize": _LABEL_SIZE, "color": INK, "zorder": 4}
    if abs(normal[1]) > 0.85 and bend:  # one of several level bonds: on the outer side
        va = "bottom" if bend > 0 else "top"
        _write(ax, middle + np.sign(bend) * gap, _name_and_size(leg, " "), ha="center", va=va, **style)
    elif abs(normal[1]) > 0.85:  # a level bond: the name above, the dimension below
        _write(ax, middle + gap, leg.name, ha="center", va="bottom", **style)
        _write(ax, middle - gap, leg.size_text, ha="center", va="top", **style)
    else:  # on the right
        right = normal if normal[0] >= 0 else -normal
        ha = "left" if right[0] > 0.3 else "center"
        va = "center" if abs(right[0]) > 0.85 else "bottom" if right[1] > 0 else "top"
        position = middle + abs(gap[0]) * np.sign(right) + 0.03 * right
        _write(ax, position, _name_and_size(leg, "\n"), ha=ha, va=va, **style)


def _name_and_size(leg: Leg, separator: str) -> str:
    return separator.join(part for part in (leg.name, leg.size_text) if part)


def _write(ax: Axes, position: Array, text: str, **style: Any) -> None:
    x, y = position
    ax.text(x, y, text, **style)


def _rim(diagram: Diagram, bubble: Bubble) -> Limits:
    inside = [diagram.nodes[k].position for k in bubble.nodes]
    pad = bubble_padding(diagram, bubble)
    (x0, y0), (x1, y1) = np.min(inside, axis=0) - pad, np.max(inside, axis=0) + pad
    return float(x0), float(x1), float(y0), float(y1)


def _paint_bubble(ax: Axes, diagram: Diagram, bubble: Bubble) -> None:
    from matplotlib.patches import FancyBboxPatch

    x0, x1, y0, y1 = _rim(diagram, bubble)
    style: dict[str, Any] = {"fc": (0.84, 0.28, 0.56, 0.09), "ec": BUBBLE_COLOR, "lw": 1.3, "zorder": 0}
    box = "round,pad=0,rounding_size=0.35"
    ax.add_patch(FancyBboxPatch((x0, y0), x1 - x0, y1 - y0, boxstyle=box, **style))
    style = {"ha": "right", "va": "top", "fontsize": _LABEL_SIZE, "color": BUBBLE_COLOR, "zorder": 5}
    ax.text(x1 - 0.18, y1 - 0.04, bubble.label, **style)


def _paint_legend(ax: Axes, diagram: Diagram, x: float, y: float) -> float:
    """Explain the special shapes of the diagram in a line centred at (x, y); return the left end of the line."""
    from matplotlib.transforms import Affine2D

    kinds = [kind for kind in _LEGEND if any(node.kind == kind for node in diagram.nodes)]
    widths = [0.75 + 0.07 * len(_LEGEND[kind]) for kind in kinds]
    start = left = x - sum(widths) / 2
    for kind, width in zip(kinds, widths, strict=True):
        glyph = node_patch(Node(kind, "", (0.0, 0.0), (1.0, 0.0) if kind == "isometry" else None))
        glyph.set_transform(Affine2D().scale(0.38).translate(left + 0.2, y) + ax.transData)
        ax.add_patch(glyph)
        ax.text(left + 0.4, y, _LEGEND[kind], ha="left", va="center", fontsize=_LABEL_SIZE, color="#555555")
        left += width
    return start


def paint_node(ax: Axes, node: Node) -> None:
    """Paint one node and its label."""
    x, y = node.position
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, "zorder": 5}
    if node.kind == "text":
        ax.text(x, y, node.label, fontsize=10, **style)
    elif node.kind == "ellipsis":
        ax.text(x, y, "· · ·", fontsize=13, fontweight="bold", bbox={"fc": "white", "ec": "none", "pad": 1.0}, **style)
        ax.text(x, y - 0.3, node.label, fontsize=_LABEL_SIZE, **{**style, "va": "top"})
    else:
        ax.add_patch(node_patch(node))
        if node.label:
            ax.text(*_label_position(node), node.label, fontsize=_LABEL_SIZE, linespacing=1.5, **style)


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
        width = 0.3 + 0.085 * count_letters(node.label)
        box = "round,pad=0,rounding_size=0.2"
        return FancyBboxPatch((x - width / 2, y - 0.22), width, 0.44, boxstyle=box, **style)
    if node.kind == "tensor":
        return Circle((x, y), _RADIUS, **style)
    if node.kind in ("matrix", "unitary"):
        side = 1.7 * _RADIUS
        height = side * (1.0 if "\n" not in node.label else 1.45)  # two lines, with superscripts and subscripts
        box = "round,pad=0,rounding_size=0.04"
        return FancyBboxPatch((x - side / 2, y - height / 2), side, height, boxstyle=box, **style)
    r = 1.15 * _RADIUS
    diamond = [(x + r, y), (x, y + r), (x - r, y), (x, y - r)]
    corners = diamond if node.kind == "weights" else _triangle(node)
    return Polygon(corners, closed=True, joinstyle="round", **style)


def visible_text(label: str) -> str:
    """Return a label without its TeX markup."""
    return re.sub(r"\\[a-z]+|[${}_^]", "", label, flags=re.IGNORECASE)


def count_letters(label: str) -> int:
    """Return the length of the longest line of a label, without its markup."""
    return max(len(line) for line in visible_text(label).split("\n"))


def _label_position(node: Node) -> Point:
    """Return the centre of a node or, in a triangle, a point nearer to the base."""
    (x, y), (dx, dy) = node.position, node.direction or (0.0, 0.0)
    length = math.hypot(dx, dy) or 1.0
    return x - 0.04 * dx / length, y - 0.04 * dy / length


def _triangle(node: Node) -> list[Point]:
    (x, y), (dx, dy) = node.position, node.direction or (1.0, 0.0)
    tip, r = math.atan2(dy, dx), 1.35 * _RADIUS
    return [(x + r * math.cos(angle), y + r * math.sin(angle)) for angle in (tip, tip + 2.2, tip - 2.2)]
