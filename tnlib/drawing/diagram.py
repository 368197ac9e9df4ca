"""Diagrams as data: nodes at positions, legs between them, bubbles around them. `paint` turns them into figures.

All classes check their arguments and raise ArgumentError or ArgumentTypeError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypeAlias

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import is_one_of
from tnlib.drawing.evaluation import evaluate

Point: TypeAlias = tuple[float, float]

KINDS = ("tensor", "matrix", "isometry", "unitary", "weights", "delta", "function", "ellipsis", "text")


@dataclass(frozen=True)
class Node:
    """A tensor, or a piece of text.

    Parameters
    ----------
    kind
        "tensor" (drawn as a circle), "matrix" (square), "isometry" (triangle), "unitary" (blue square), "weights"
        (diamond: singular values and other diagonal matrices), "delta" (dot: a copy tensor), "function" (pink: of the
        array at the legs that end here, read by those that begin here; "+" is a sum, no label a copy), "ellipsis"
        (omitted nodes), "text" (a sign between diagrams).
    label
        Text on the shape.
    position
        (x, y), y upwards; the distance between neighbours is about 1.
    direction
        Direction of the tip of an isometry: towards its smaller leg. None for other kinds.

    Examples
    --------
    >>> Node("matrix", "A", (0.0, 1.0)).position
    (0.0, 1.0)
    """

    kind: str
    label: str
    position: Point
    direction: Point | None = None

    def __post_init__(self) -> None:
        if not is_one_of(self.kind, KINDS):
            raise ArgumentError(f"Node: kind must be one of {', '.join(KINDS)}, got {self.kind!r}; choose one.")
        _check_point("Node", "position", self.position)
        if self.direction is not None:
            _check_point("Node", "direction", self.direction)
        if (self.direction is None) == (self.kind == "isometry"):
            raise ArgumentError(
                f"Node: direction must be given for an isometry and for nothing else, got {self.direction} for a "
                f"{self.kind}; it is the direction of the tip of the triangle."
            )


@dataclass(frozen=True)
class Leg:
    """An index of a tensor: a bond, drawn as a line between two nodes, or an open leg with a free end.

    Parameters
    ----------
    a, b
        Numbers of nodes; b is None for an open leg.
    name
        Name of the index.
    size
        Dimension of the index, which sets the line width; None if unknown.
    end
        End point of an open leg.
    via
        Points through which the line runs from a.
    towards
        The node, a or b, to which the gauge arrow on a bond points; None for no arrow.
    axes
        Axes of the arrays of a and b; None where these are in the order of the legs.

    Examples
    --------
    >>> Leg(0, 1, "i", 4096).size_text
    '4,096'
    """

    a: int
    b: int | None
    name: str = ""
    size: int | None = None
    end: Point | None = None
    via: tuple[Point, ...] = ()
    towards: int | None = None
    axes: tuple[int | None, int | None] = (None, None)

    def __post_init__(self) -> None:
        for name in ("a", "b", "towards"):
            number = getattr(self, name)
            if not isinstance(number, Integral) and (name == "a" or number is not None):
                raise ArgumentTypeError(f"Leg: {name} must be the number of a node, got {number!r}; count from 0.")
        if (self.b is None) != (self.end is not None):
            raise ArgumentError(
                f"Leg: end must be given where b is None and only there, got end {self.end} and b {self.b}; "
                "an open leg ends at a point, another one at a node."
            )
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise ArgumentError(f"Leg: size must be a positive integer or None, got {self.size!r}; pass the dimension.")
        if self.towards is not None and (self.b is None or self.towards not in (self.a, self.b)):
            raise ArgumentError(
                f"Leg: towards must be one of the two nodes of a bond, got {self.towards} for {self.a} and {self.b}; "
                "leave it out for no arrow."
            )
        if not isinstance(self.via, tuple):
            raise ArgumentTypeError(f"Leg: via must be a tuple of points, got {self.via!r}; pass ((x, y), ...).")
        for point in self.points:
            _check_point("Leg", "end or via", point)

    @property
    def size_text(self) -> str:
        """The size as text, empty if unknown."""
        return "" if self.size is None else f"{self.size:,}"

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of the line besides nodes, those of `via` and `end`."""
        return self.via if self.end is None else (*self.via, self.end)


@dataclass(frozen=True)
class Bubble:
    """A nonlinear function, applied to the contraction of the nodes inside.

    Parameters
    ----------
    nodes
        Numbers of the nodes inside, including those of nested bubbles.
    label
        Name of the function.

    Examples
    --------
    >>> nodes = Node("matrix", "W", (0, 1)), Node("tensor", "x", (0, 0))
    >>> legs = Leg(0, 1, "j", 64), Leg(0, None, "i", 256, (0, 2))
    >>> Diagram(nodes, legs, bubbles=(Bubble((0, 1), "relu"),)).open_legs     # relu(W x)
    (('i', 256),)
    """

    nodes: tuple[int, ...]
    label: str

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, tuple) or not all(isinstance(k, Integral) for k in self.nodes):
            raise ArgumentTypeError(
                f"Bubble: nodes must be a tuple of numbers of nodes, got {self.nodes!r}; pass (0,)."
            )


@dataclass(frozen=True)
class Diagram:
    """A tensor network diagram: nodes, open legs and bonds, a title above, and bubbles for nonlinear functions.

    Legs and bubbles refer to nodes by number, from 0.

    Examples
    --------
    >>> Diagram((Node("tensor", "v", (0, 0)),), (Leg(0, None, "i", 3, (0, -1)),)).open_legs
    (('i', 3),)
    """

    nodes: tuple[Node, ...]
    legs: tuple[Leg, ...]
    title: str = ""
    bubbles: tuple[Bubble, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("nodes", Node), ("legs", Leg), ("bubbles", Bubble)):
            _check_all("Diagram", name, getattr(self, name), kind)
        ends = [k for leg in self.legs for k in (leg.a, leg.b) if k is not None]
        ends += [k for bubble in self.bubbles for k in bubble.nodes]
        if wrong := [k for k in ends if not 0 <= k < len(self.nodes)]:
            raise ArgumentError(
                f"Diagram: legs and bubbles must name nodes from 0 to {len(self.nodes) - 1}, got {wrong[0]}; "
                "add the node."
            )
        for k, node in enumerate(self.nodes):
            sizes = {leg.size for leg in self.legs if k in (leg.a, leg.b)} - {None} if node.kind == "delta" else ()
            if len(sizes) > 1:
                raise ArgumentError(f"Diagram: legs of a copy tensor must have one size, got {sizes}; correct them.")

    def evaluate(self, values: Mapping[Any, Any]) -> Array:
        """Return the value of the diagram: an array whose axes are the open legs, in order.

        Bubbles are contracted first, smallest first. Functions of nodes are applied in the order of the nodes. The
        inputs of a sum are its terms, broadcast as in numpy; outputs repeat its legs once per copy.

        Parameters
        ----------
        values
            From the label (or the number) of every node to its array, whose axes are the legs of the node in the order
            of `legs`; from the label of every bubble and function to a callable of an array with such axes. Copy
            tensors, sums and copies need no entry.

        Raises
        ------
        ArgumentError
            If a value is missing or has another shape, or the diagram has signs, as an equation has.

        Examples
        --------
        >>> import numpy as np
        >>> nodes = Node("matrix", "A", (0, 0)), Node("tensor", "v", (1, 0))
        >>> legs = Leg(0, None, "i", 2, (-1, 0)), Leg(0, 1, "j", 2)
        >>> layer = Diagram(nodes, legs, "", (Bubble((0, 1), "relu"),))
        >>> values = {"A": [[1, 2], [3, -4]], "v": [1, 1], "relu": lambda x: np.maximum(x, 0)}
        >>> layer.evaluate(values)
        array([3., 0.])
        """
        return evaluate(self.nodes, self.legs, self.bubbles, values)

    @property
    def open_legs(self) -> tuple[tuple[str, int | None], ...]:
        """Names and sizes of the open legs, in order."""
        return tuple((leg.name, leg.size) for leg in self.legs if leg.b is None)

    @property
    def bonds(self) -> tuple[tuple[str, int | None], ...]:
        """Names and sizes of the bonds, in order."""
        return tuple((leg.name, leg.size) for leg in self.legs if leg.b is not None)

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Smallest and largest x and y of all points, (x0, x1, y0, y1)."""
        points = [node.position for node in self.nodes]
        points += [point for leg in self.legs for point in leg.points]
        xs, ys = zip(*points, strict=True) if points else ((0.0,), (0.0,))
        return min(xs), max(xs), min(ys), max(ys)

    def moved(self, dx: float, dy: float) -> Diagram:
        """Return the diagram translated by (dx, dy)."""
        _check_point("Diagram.moved", "(dx, dy)", (dx, dy))

        def translated(point: Point) -> Point:
            return point[0] + dx, point[1] + dy

        nodes = tuple(replace(node, position=translated(node.position)) for node in self.nodes)
        legs = tuple(
            replace(leg, end=leg.end and translated(leg.end), via=tuple(map(translated, leg.via))) for leg in self.legs
        )
        return replace(self, nodes=nodes, legs=legs)


def text(words: str, at: Point) -> Diagram:
    """Return a diagram of text alone: a heading, or a sign between diagrams."""
    return Diagram((Node("text", words, at),), ())


def join(diagrams: tuple[Diagram, ...], title: str = "") -> Diagram:
    """Return the union of diagrams at the positions they have, under a new title.

    Examples
    --------
    >>> a = Diagram((Node("matrix", "A", (0, 0.0)),), ())
    >>> b = Diagram((Node("matrix", "B", (1, 0.0)),), ())
    >>> [(node.label, node.position) for node in join((a, b)).nodes]
    [('A', (0, 0.0)), ('B', (1, 0.0))]
    """
    _check_all("join", "diagrams", diagrams, Diagram)
    nodes: list[Node] = []
    legs: list[Leg] = []
    bubbles: list[Bubble] = []
    for diagram in diagrams:
        first = len(nodes)
        nodes += diagram.nodes
        for leg in diagram.legs:
            b, towards = (None if k is None else k + first for k in (leg.b, leg.towards))
            legs.append(replace(leg, a=leg.a + first, b=b, towards=towards))
        bubbles += [Bubble(tuple(k + first for k in b.nodes), b.label) for b in diagram.bubbles]
    return Diagram(tuple(nodes), tuple(legs), title, tuple(bubbles))


def _check_all(owner: str, parameter: str, items: object, kind: type) -> None:
    wrong = [x for x in items if not isinstance(x, kind)] if isinstance(items, tuple | list) else [items]
    if wrong:
        raise ArgumentTypeError(
            f"{owner}: {parameter} must be a tuple of {kind.__name__}, got {wrong[0]!r:.80}; "
            f"make {kind.__name__}s first."
        )


def _check_point(owner: str, parameter: str, point: object) -> None:
    if not (isinstance(point, tuple) and len(point) == 2 and all(isinstance(x, int | float) for x in point)):
        raise ArgumentTypeError(f"{owner}: {parameter} must be a pair of numbers, got {point!r}; pass (x, y).")
    if not all(math.isfinite(x) for x in point):
        raise ArgumentError(f"{owner}: {parameter} must be finite, got {point!r}; pass (x, y).")
