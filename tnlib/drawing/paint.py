"""A diagram on paper, with matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tnlib.drawing.graph import Bubble, Diagram, Leg, Node
from tnlib.drawing.shapes import INK, paint_node, shape_of

Limits: TypeAlias = tuple[float, float, float, float]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = 0.8  # a unit of a diagram
_MARGIN = 0.45
_MEANING = {
    "isometry": "isometry, tip to the smaller leg",
    "unitary": "unitary",
    "weights": "diagonal",
    "delta": "copy tensor",
}
_BUBBLE = "#d6478f"


def paint(diagram: Diagram) -> Figure:
    """Return a figure as large as the diagram needs, so that text has one size in all of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=150)
    FigureCanvasAgg(figure)  # which measures text
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_axis_off()
    x0, x1, y0, y1 = diagram.bounds
    around = (
        _MARGIN if not diagram.bubbles else 0.1 + max(bubble_padding(diagram, bubble) for bubble in diagram.bubbles)
    )
    _resize(figure, ax, (x0 - around, x1 + around, y0 - around, y1 + around))
    for bubble in sorted(diagram.bubbles, key=lambda b: -len(b.nodes)):
        _paint_bubble(ax, diagram, bubble)
    for leg, bend in zip(diagram.legs, _bends(diagram), strict=True):
        _paint_leg(ax, diagram, leg, bend)
    for node in diagram.nodes:
        paint_node(ax, node)
    x0, x1, y0, y1 = _resize(figure, ax, _with_texts(ax, 0.12))
    if diagram.title:
        _write(ax, ((x0 + x1) / 2, y1 + 0.15), diagram.title, ha="center", va="bottom", fontsize=9, color=INK)
    left = _paint_meanings(ax, _meanings(diagram), (x0 + x1) / 2, y0 - 0.2)
    x0, x1, y0, y1 = _with_texts(ax, 0.14)
    _resize(figure, ax, (min(x0, left), x1, y0, y1))
    return figure


def _resize(figure: Figure, ax: Axes, limits: Limits) -> Limits:
    """Give the figure these limits, and the size in which a unit is as long as it always is."""
    x0, x1, y0, y1 = limits
    figure.set_size_inches(_INCHES * (x1 - x0), _INCHES * (y1 - y0))
    ax.set(xlim=(x0, x1), ylim=(y0, y1))
    return limits


def _with_texts(ax: Axes, margin: float) -> Limits:
    """Return the limits that leave this margin around every text."""
    (x0, x1), (y0, y1) = ax.get_xlim(), ax.get_ylim()
    back = ax.transData.inverted()
    for text in ax.texts:
        (left, low), (right, high) = back.transform(text.get_window_extent().get_points())
        x0, x1 = min(x0, left - margin), max(x1, right + margin)
        y0, y1 = min(y0, low - margin), max(y1, high + margin)
    return float(x0), float(x1), float(y0), float(y1)


def thickness(size: int | None) -> float:
    """Return the width of a line in points: it grows with the logarithm of the dimension."""
    return 1.0 if size is None else 0.7 + 0.45 * math.log2(size)


def _meanings(diagram: Diagram) -> list[str]:
    kinds = {node.kind for node in diagram.nodes}
    return [kind for kind in _MEANING if kind in kinds]


def _bends(diagram: Diagram) -> list[float]:
    """Return how far each leg leaves the straight line, so that several bonds between two nodes stay apart."""
    between: dict[frozenset[int], list[int]] = {}
    for k, leg in enumerate(diagram.legs):
        if leg.b is not None and not leg.via:
            between.setdefault(frozenset((leg.a, leg.b)), []).append(k)
    out = [0.0] * len(diagram.legs)
    for same in between.values():
        for j, k in enumerate(same):
            side = 1 if diagram.legs[k].a == min(diagram.legs[k].a, diagram.legs[k].b or 0) else -1
            out[k] = side * 0.45 * (j - (len(same) - 1) / 2)
    return out


def _paint_leg(ax: Axes, diagram: Diagram, leg: Leg, bend: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    start = diagram.nodes[leg.a].position
    stop = diagram.nodes[leg.b].position if leg.b is not None else leg.end
    points = np.array([start, *leg.via, stop], dtype=float)
    vertices, codes = (_bent(points, bend), [Path.MOVETO, Path.CURVE3, Path.CURVE3]) if bend else _rounded(points)
    width = thickness(leg.size)
    bare = any(k is not None and diagram.nodes[k].kind == "text" for k in (leg.a, leg.b))  # a line that goes through
    cap = "projecting" if bare else "butt"
    line = PathPatch(Path(vertices, codes), fill=False, lw=width, ec="#555555", capstyle=cap, zorder=1)
    ax.add_patch(line)
    if leg.towards is not None:
        _paint_arrow(ax, leg, points, bend, width)
    if leg.b is None:
        _name_open_leg(ax, leg, points)
    else:
        _name_bond(ax, leg, points, bend)


def _bent(points: Any, bend: float) -> Any:
    a, b = points
    return np.array([a, (a + b) / 2 + 2 * bend * _normal(a, b), b])


def _rounded(points: Any, radius: float = 0.18) -> tuple[Any, list[Any]]:
    """Return a path through the points, its corners cut round."""
    from matplotlib.path import Path

    vertices, codes = [points[0]], [Path.MOVETO]
    for before, corner, behind in zip(points, points[1:], points[2:], strict=False):
        near, far = (_step_from(corner, other, radius) for other in (before, behind))
        vertices += [near, corner, far]
        codes += [Path.LINETO, Path.CURVE3, Path.CURVE3]
    return np.array([*vertices, points[-1]]), [*codes, Path.LINETO]


def _step_from(a: Any, b: Any, length: float) -> Any:
    distance = float(np.hypot(*(b - a)))
    return a + (b - a) * min(0.5, length / distance if distance else 0.0)


def _normal(a: Any, b: Any) -> Any:
    """Return the unit vector across the line, upwards where that can be said."""
    along = (b - a) / (float(np.hypot(*(b - a))) or 1.0)
    across = np.array([-along[1], along[0]])
    return across if across[1] > 0 or (across[1] == 0 and across[0] > 0) else -across


def _longest(points: Any) -> tuple[Any, Any]:
    """Return the ends of the longest straight piece of a line."""
    lengths = np.hypot(*(points[1:] - points[:-1]).T)
    k = int(np.argmax(lengths))
    return points[k], points[k + 1]


def _paint_arrow(ax: Axes, leg: Leg, points: Any, bend: float, width: float) -> None:
    a, b = _longest(points)
    along = (b - a) / (float(np.hypot(*(b - a))) or 1.0) * (1 if leg.towards == leg.b else -1)
    across = np.array([-along[1], along[0]])
    size = 0.065 + 0.012 * width
    tip = (a + b) / 2 + bend * _normal(a, b) + size * along
    ax.fill(
        *np.array([tip, tip - 2 * size * along + size * across, tip - 2 * size * along - size * across]).T,
        color="#1f6fb2",
        zorder=2,
        lw=0,
    )


def _name_open_leg(ax: Axes, leg: Leg, points: Any) -> None:
    before, end = points[-2], points[-1]
    x, y = (end - before) / (float(np.hypot(*(end - before))) or 1.0)
    ha = "center" if abs(x) < 0.4 else "left" if x > 0 else "right"
    va = "center" if abs(y) < 0.4 else "bottom" if y > 0 else "top"
    size = "" if leg.size is None else f"{leg.size:,}"
    upright = abs(x) < 0.4 or abs(y) < 0.4
    text = ("\n" if upright else " ").join(part for part in (leg.name, size) if part)
    _write(ax, (end + 0.06 * np.array([x, y])), text, ha=ha, va=va, fontsize=7, color=INK, linespacing=1.05, zorder=4)


def _name_bond(ax: Axes, leg: Leg, points: Any, bend: float) -> None:
    a, b = _longest(points)
    across = _normal(a, b)
    middle = (a + b) / 2 + bend * across
    gap = (0.07 + 0.006 * thickness(leg.size)) * across
    if leg.towards is not None:
        gap = gap + 0.05 * across
    size = "" if leg.size is None else f"{leg.size:,}"
    style: dict[str, Any] = {"fontsize": 6.5, "color": INK, "zorder": 4}
    if abs(across[1]) > 0.85 and bend:  # one of several: all on the outer side
        text = " ".join(part for part in (leg.name, size) if part)
        _write(ax, middle + np.sign(bend) * gap, text, ha="center", va="bottom" if bend > 0 else "top", **style)
        return
    if abs(across[1]) > 0.85:  # a level line: the name above, the size below
        _write(ax, middle + gap, leg.name, ha="center", va="bottom", **style)
        _write(ax, middle - gap, size, ha="center", va="top", **style)
        return
    side = across if across[0] >= 0 else -across
    text = "\n".join(part for part in (leg.name, size) if part)
    _write(
        ax,
        middle + abs(gap[0]) * np.sign(side) + 0.03 * side,
        text,
        ha="left" if side[0] > 0.3 else "center",
        va="center" if abs(side[0]) > 0.5 else "bottom" if side[1] > 0 else "top",
        **style,
    )


def _write(ax: Axes, at: Any, text: str, **style: Any) -> None:
    x, y = at
    ax.text(float(x), float(y), text, **style)


def bubble_padding(diagram: Diagram, bubble: Bubble) -> float:
    """Return how far a bubble reaches beyond the middles of its nodes: further, the more bubbles it holds."""
    return 0.55 + 0.27 * sum(set(other.nodes) < set(bubble.nodes) for other in diagram.bubbles)


def _paint_bubble(ax: Axes, diagram: Diagram, bubble: Bubble) -> None:
    from matplotlib.patches import FancyBboxPatch

    inside = [diagram.nodes[k].position for k in bubble.nodes]
    pad = bubble_padding(diagram, bubble)
    (x0, y0), (x1, y1) = np.min(inside, axis=0), np.max(inside, axis=0)
    box = FancyBboxPatch((x0 - pad, y0 - pad), x1 - x0 + 2 * pad, y1 - y0 + 2 * pad,
                         boxstyle="round,pad=0,rounding_size=0.35", fc=(0.84, 0.28, 0.56, 0.09), ec=_BUBBLE,
                         lw=1.3, zorder=0)  # fmt: skip
    ax.add_patch(box)
    ax.text(x1 + pad - 0.18, y1 + pad - 0.04, bubble.label, ha="right", va="top", fontsize=8, color=_BUBBLE, zorder=5)


def _paint_meanings(ax: Axes, kinds: list[str], x: float, y: float) -> float:
    """Say below the diagram what its special shapes mean; return where that begins."""
    from matplotlib.transforms import Affine2D

    widths = [0.75 + 0.07 * len(_MEANING[kind]) for kind in kinds]
    start = at = x - sum(widths) / 2
    for kind, width in zip(kinds, widths, strict=True):
        small = shape_of(Node(kind, "", (0.0, 0.0), (1.0, 0.0) if kind == "isometry" else None))
        small.set_transform(Affine2D().scale(0.38).translate(at + 0.2, y) + ax.transData)
        ax.add_patch(small)
        _write(ax, (at + 0.4, y), _MEANING[kind], ha="left", va="center", fontsize=6.5, color="#555555")
        at += width
    return start
