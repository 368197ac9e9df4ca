"""Draw formats, arrays, networks and diagrams, equations between them, and the steps of a TT-SVD sweep."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._files import write_whole
from tnlib._fit import Fit, refuse_other_arrays, shorten, wrong_type
from tnlib._format import Format
from tnlib._registry import format_class, implementation
from tnlib._typing import Array
from tnlib._validate import as_array, as_target
from tnlib.drawing.diagram import Diagram, Leg, Node, join, text
from tnlib.drawing.layout import circle_angle, fan, is_isometric_from, plain_kind
from tnlib.drawing.paint import bubble_padding, count_letters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GAP = 0.9  # between diagrams in a column
_SIGN_GAP = 0.32  # on either side of a sign
_LEG_LETTER = 0.088  # width of a letter on a leg
_SIGN_LETTER = 0.13  # width of a letter of a sign
_NODE_RADIUS = 0.32
_STEP, _REACH, _MAX_CORES = 1.3, 0.75, 10  # of a sweep: distance of neighbours, length of an open leg
_FORMATS = (".svg", ".png")


def draw(value: Any) -> Picture:
    """Draw `value` in Penrose's graphical notation: shapes are tensors, lines their indices.

    Parameters
    ----------
    value
        A format of tnlib, an array, a `TensorNetwork` of quimb or a `Network`, a `Diagram`, any object with a method
        `diagram()` that returns one, or a list of these or a dict from titles to these, drawn in a column: for example
        a train before and after rounding, or the steps of a sweep.

    Returns
    -------
    Picture
        With `.figure` (matplotlib), `.save(path)` for SVG and PNG, and `.diagram`; notebooks show it. Triangles are
        isometries, measured from the arrays, with the tip at the smaller leg; blue squares unitaries; diamonds singular
        values and weights; dots copy tensors; circles and squares other tensors. The line width grows with the
        logarithm of the dimension. Arrows on bonds point to the centre of a train; of more than 30 cores, both ends and
        the neighbours of the centre are drawn.

    References
    ----------
    R. Penrose, "Applications of negative dimensional tensors", Combinatorial Mathematics and its Applications (1971).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> picture = tnlib.draw(tnlib.svd(np.diag([3.0, 4.0, 0.0])).value)
    >>> [node.kind for node in picture.diagram.nodes], picture.diagram.open_legs
    (['isometry', 'weights', 'isometry'], (('k0', 3), ('k1', 3)))
    """
    return Picture(as_diagram(value))


def as_diagram(value: Any) -> Diagram:
    """Return the diagram that `draw` paints."""
    if isinstance(value, Diagram):
        return value
    refuse_other_arrays("draw", "value", value)
    if (format_diagram := implementation("diagram", type(value))) is not None:
        diagram: Diagram = format_diagram(value)
        return diagram
    if isinstance(value, np.ndarray):
        return _array_diagram(as_array("draw", "value", value))
    if isinstance(value, Mapping):
        return _column([(str(title), as_diagram(item)) for title, item in value.items()])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _column([("", as_diagram(item)) for item in value])
    method = getattr(value, "diagram", None)
    if callable(method) and isinstance(diagram := method(), Diagram):
        return diagram
    advice = "draw its .value" if isinstance(value, Fit) else "decompose it first, or give it a method diagram()"
    raise ArgumentTypeError(
        f"draw: value must be a format, a network or a Diagram, got {type(value).__name__}; {advice}."
    )


def _array_diagram(a: Array) -> Diagram:
    """Return one node with its open legs: those of a matrix left and right, others on a circle."""
    ndim, origin = a.ndim, (0.0, 0.0)
    angles = [math.pi, 0.0] if ndim == 2 else [circle_angle(k, ndim) for k in range(ndim)]
    legs = [leg for k in range(ndim) for leg in fan(0, (k,), a.shape, origin, angles[k])]
    return Diagram((Node(plain_kind(ndim), "", origin),), tuple(legs), f"{shorten(a.shape, ' x ')}, dense")


def _column(named: Sequence[tuple[str, Diagram]]) -> Diagram:
    """Return diagrams one below the other, each with its name and its own title as a heading."""
    if not named:
        raise ArgumentTypeError("draw: value must hold at least one value to draw, got none; pass a format.")
    parts: list[Diagram] = []
    top = 0.0
    for name, diagram in named:
        x0, x1, y0, y1 = diagram.bounds
        heading = ": ".join(words for words in (name, diagram.title) if words)
        if heading:
            parts.append(text(heading, (0.0, top + 0.75)))
        parts.append(diagram.moved(-(x0 + x1) / 2, top - y1))
        top += y0 - y1 - _GAP - 0.9 * bool(heading)
    return join(tuple(parts))


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """A diagram that notebooks show and `save` writes to a file; the result of `draw`.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> picture = tnlib.draw(tnlib.tt_svd(np.ones((4, 5, 6))).value)
    >>> picture, picture.diagram.bonds
    (Picture of TensorTrain, 4 x 5 x 6: 3 nodes, 5 legs, (('bond1', 1), ('bond2', 1)))
    """

    diagram: Diagram

    def __repr__(self) -> str:
        of = f" of {self.diagram.title}" if self.diagram.title else ""
        return f"Picture{of}: {len(self.diagram.nodes)} nodes, {len(self.diagram.legs)} legs"

    @cached_property
    def figure(self) -> Figure:
        """The matplotlib Figure, outside pyplot."""
        from tnlib.drawing.paint import paint

        return paint(self.diagram)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an SVG or PNG file, atomically; `path` ends in .svg or .png, and an existing file is replaced."""
        target = as_target("Picture.save", path)
        kind = target.suffix.lower()
        if kind not in _FORMATS:
            raise ArgumentError(f"Picture.save: path must end in .svg or .png, got {target.name}; rename it.")
        write_whole(target, self._bytes(kind[1:]))

    def _repr_svg_(self) -> str:
        return self._bytes("svg").decode()

    def _bytes(self, kind: str) -> bytes:
        import matplotlib as mpl

        buffer = io.BytesIO()
        # Without a date and with fixed ids, equal diagrams give equal files.
        with mpl.rc_context({"svg.hashsalt": "tnlib"}):
            self.figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
        return buffer.getvalue()


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
    >>> diagram = equation(x, "=", tnlib.svd(x).value)
    >>> [node.label for node in diagram.nodes]
    ['', '=', 'U', 's', 'V$^H$']
    >>> diagram.open_legs  # of x and of its SVD
    (('k0', 2), ('k1', 3), ('k0', 2), ('k1', 3))
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
        x += right - left + _SIGN_GAP
    return join(tuple(placed), title)


def _extent(diagram: Diagram) -> tuple[float, float]:
    """Return the smallest and largest x, including the text at the ends of open legs."""
    spans = [diagram.bounds[:2]]
    for node in diagram.nodes:
        radius = _NODE_RADIUS if node.kind != "text" else _SIGN_LETTER / 2 * count_letters(node.label)
        spans.append((node.position[0] - radius, node.position[0] + radius))
    for leg in diagram.legs:
        if leg.end is not None:
            width = _LEG_LETTER * max(count_letters(leg.name), len(leg.size_text)) + 0.06
            dx = leg.end[0] - (leg.via[-1] if leg.via else diagram.nodes[leg.a].position)[0]
            before, behind = (0.5, 0.5) if abs(dx) < 0.3 else (0.0, 1.0) if dx > 0 else (1.0, 0.0)
            spans.append((leg.end[0] - before * width, leg.end[0] + behind * width))
    for bubble in diagram.bubbles:
        padding = bubble_padding(diagram, bubble)
        inside = [diagram.nodes[k].position[0] for k in bubble.nodes]
        spans.append((min(inside) - padding, max(inside) + padding))
    return min(left for left, _ in spans), max(right for _, right in spans)


def sweep_steps(tt: Format) -> dict[str, Diagram]:
    """Return one diagram per step of the TT-SVD sweep that produces `tt` from a dense tensor, by title.

    `tt` is a left-canonical TensorTrain of 2 to 10 cores, as `tt_svd` returns it. Step k is an SVD of the remainder, on
    the right of the isometries of the steps before.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> steps = sweep_steps(tnlib.tt_svd(np.arange(24.0).reshape(2, 3, 4)).value)
    >>> for name, step in steps.items():
    ...     print(name, [node.kind for node in step.nodes])
    dense ['tensor']
    step 1 ['isometry', 'tensor']
    step 2 ['isometry', 'isometry', 'tensor']
    """
    if not isinstance(tt, format_class("TensorTrain")):
        raise wrong_type("sweep_steps", "tt", "a TensorTrain", tt, "use tnlib.tt_svd")
    count = tt.ndim
    if not 2 <= count <= _MAX_CORES:
        raise ArgumentError(
            f"sweep_steps: tt must have 2 to {_MAX_CORES} cores, got {count}; draw the train with tnlib.draw."
        )
    for k, core in enumerate(tt.arrays()[:-1]):
        if not is_isometric_from(core, (2,)):
            raise ArgumentError(
                f"sweep_steps: tt must be left-canonical, got core {k} that is no isometry; "
                "pass tnlib.canonicalize(tt, d - 1)."
            )
    titles = ["dense", *(f"step {k}" for k in range(1, count))]
    return {title: _step(tt, k) for k, title in enumerate(titles)}


def _step(tt: Format, n_isometries: int) -> Diagram:
    """Return the diagram of the first isometries and the remainder, which has all other legs."""
    last = tt.ndim - 1
    nodes = [Node("isometry", str(k), (k * _STEP, 0.0), (1.0, 0.0)) for k in range(n_isometries)]
    nodes.append(Node("tensor", str(last) if n_isometries == last else "rest", (n_isometries * _STEP, 0.0)))
    legs = []
    for k, n in enumerate(tt.shape):
        if 0 < k <= n_isometries:
            legs.append(Leg(k - 1, k, f"bond{k}", tt.ranks[k], towards=k))
        via = ((k * _STEP, -0.45),) if k > n_isometries else ()
        legs.append(Leg(min(k, n_isometries), None, f"k{k}", n, (k * _STEP, -_REACH), via))
    stored = sum(core.size for core in tt.arrays()[:n_isometries])
    remaining = tt.ranks[n_isometries] * math.prod(tt.shape[n_isometries:])
    return Diagram((*nodes,), (*legs,), f"{stored + remaining:,} parameters")
