"""Kinds of nodes, measured from arrays, and their positions: chains in rows, stars around a core, fans of open legs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np

from tnlib._fit import shorten
from tnlib._format import Format
from tnlib._typing import Array
from tnlib.drawing.diagram import Diagram, Leg, Node, Point
from tnlib.linalg.multilinear import matrix_from
from tnlib.linalg.orthogonal import is_isometry

STEP = 1.5  # between neighbours
REACH = 1.0  # length of an open leg
_MAX_ENTRIES = 1 << 22  # larger tensors are drawn as plain tensors: their Gram matrices would take seconds
_MAX_NDIM = 6  # with more legs, only single legs are tried as the tip of a triangle: groups of legs are too many


def is_isometric_from(a: Array, legs: Sequence[int]) -> bool:
    """Return True if `a` is isometric from the group `legs` into its other legs."""
    return is_isometry(matrix_from(a, legs))


def is_diagonal(a: Array) -> bool:
    """Return True if `a` is a square matrix with zeros off its diagonal."""
    return a.ndim == 2 and a.shape[0] == a.shape[1] and np.count_nonzero(a) == np.count_nonzero(np.diag(a))


def is_copy_tensor(a: Array) -> bool:
    """Return True if `a`, of three legs or more, is 1 where all indices are equal and 0 elsewhere."""
    if a.ndim < 3 or len(set(a.shape)) > 1 or a.size > _MAX_ENTRIES:
        return False
    n = a.shape[0]
    return bool(np.count_nonzero(a) == n and (a[(np.arange(n),) * a.ndim] == 1).all())


def array_node(label: str, a: Array, tip: int, position: Point, direction: Point) -> Node:
    """Return the node of an array: a unitary, an isometry from leg `tip` pointing in `direction`, or neither."""
    if not is_isometric_from(a, (tip,)):
        return Node(plain_kind(a.ndim), label, position)
    if a.shape[tip] ** 2 == a.size:
        return Node("unitary", label, position)
    return Node("isometry", label, position, direction)


def node_kind(
    a: Array, leg_ends: Sequence[Point], position: Point, *, is_center: bool = False
) -> tuple[str, Point | None]:
    """Return the kind of the node of `a`, and the direction of the tip if it is an isometry.

    The tip is the smallest group of legs from which `a` is isometric, and points to the ends of these legs. The centre
    of a canonical form is never an isometry.
    """
    if is_copy_tensor(a):
        return "delta", None
    tip = () if is_center or a.size > _MAX_ENTRIES else _tip_legs(a)
    if tip and math.prod(a.shape[k] for k in tip) ** 2 == a.size and 2 * len(tip) == a.ndim:
        return "unitary", None
    x, y = (sum(leg_ends[k][axis] - position[axis] for k in tip) for axis in (0, 1))
    return ("isometry", (x, y)) if math.hypot(x, y) > 1e-9 else (plain_kind(a.ndim), None)


def plain_kind(ndim: int) -> str:
    """Return the kind of a node without structure."""
    return "matrix" if ndim == 2 else "tensor"


def _tip_legs(a: Array) -> tuple[int, ...]:
    """Return the smallest group of legs from which `a` is isometric; none if there is no such group."""
    if a.ndim < 2:
        return ()
    largest = a.ndim // 2 if a.ndim <= _MAX_NDIM else 1
    groups = (legs for n in range(1, largest + 1) for legs in itertools.combinations(range(a.ndim), n))
    return next((legs for legs in groups if is_isometric_from(a, legs)), ())


@dataclass(frozen=True)
class ChainRows:
    """Positions of the nodes of a chain, in rows of equal length that are read like text."""

    count: int
    row_height: float
    step: float
    longest_row: int = 10
    turn: float = 0.58  # height of the bond to the next row, as a fraction of row_height: below labels of open legs

    @classmethod
    def of_cores(cls, count: int, step: float, *, is_operator: bool) -> ChainRows:
        """Return the rows of cores that have open legs below or, of an operator, above and below."""
        return cls(count, 3.5, step, turn=0.5) if is_operator else cls(count, 2.7, step)

    def position(self, k: int) -> Point:
        """Return the position of node k."""
        n_rows = math.ceil(self.count / self.longest_row)
        row, column = divmod(k, math.ceil(self.count / n_rows))
        return column * self.step, -row * self.row_height

    def bond_points(self, k: int) -> tuple[Point, ...]:
        """Return the points through which the bond from node k to node k + 1 runs: none unless a new row begins."""
        (x, y), (x_next, y_next) = self.position(k), self.position(k + 1)
        if y == y_next:
            return ()
        middle = y - self.turn * self.row_height
        right, left = x + 0.6, x_next - 0.6
        return (right, y), (right, middle), (left, middle), (left, y_next)


def star(
    center: Node, factors: Sequence[Array], ranks: Sequence[int], bond: str, title: str, *, weights: bool = False
) -> Diagram:
    """Return the diagram of factors (n, r) on a circle around a node at the origin, each with its open leg.

    Factors are named A, B, C, ..., or by number if there are more than letters. Bond k is named `bond.format(k)`.
    Arrows lead from isometric factors to the centre. With `weights`, a node of weights stands on top of the circle, and
    there are no arrows.
    """
    count = len(factors) + weights
    radius = max(STEP, 1.15 * count / (2 * math.pi))
    nodes, legs = [center], []
    for k, factor in enumerate(factors):
        angle = circle_angle(k + weights, count)
        x, y = math.cos(angle), math.sin(angle)
        label = ascii_uppercase[k] if count <= len(ascii_uppercase) else str(k)
        nodes.append(array_node(label, factor, 1, (radius * x, radius * y), (-x, -y)))
        towards = 0 if nodes[-1].kind in ("isometry", "unitary") and not weights else None
        end = ((radius + REACH) * x, (radius + REACH) * y)
        legs += [
            Leg(len(nodes) - 1, None, f"k{k}", len(factor), end),
            Leg(len(nodes) - 1, 0, bond.format(k), ranks[k], towards=towards),
        ]
    if weights:
        angle = circle_angle(0, count)
        nodes.append(Node("weights", "w", (radius * math.cos(angle), radius * math.sin(angle))))
        legs.append(Leg(len(nodes) - 1, 0, bond, ranks[0]))
    return Diagram(tuple(nodes), tuple(legs), title)


def fan(node: int, legs: Sequence[int], shape: Sequence[int], position: Point, angle: float) -> list[Leg]:
    """Return the open legs `legs` of a tensor of this shape, side by side around `angle`; the first is the topmost."""
    spread = min(math.pi / 5, math.pi * 0.8 / max(1, len(legs) - 1))
    side = -1 if math.cos(angle) >= 0 else 1
    angles = [angle + side * spread * (j - (len(legs) - 1) / 2) for j in range(len(legs))]
    x, y = position
    ends = [(x + REACH * math.cos(a), y + REACH * math.sin(a)) for a in angles]
    return [Leg(node, None, f"k{k}", shape[k], end) for k, end in zip(legs, ends, strict=True)]


def point_towards(start: Point, target: Point, length: float) -> Point:
    """Return the point at `length` from `start` in the direction of `target`, below `start` if they coincide."""
    x, y = target[0] - start[0], target[1] - start[1]
    distance = math.hypot(x, y)
    if distance == 0:
        return start[0], start[1] - length
    return start[0] + length * x / distance, start[1] + length * y / distance


def circle_angle(k: int, count: int) -> float:
    """Return the angle of the k-th of `count` nodes on a circle: clockwise from the top, two of them side by side."""
    return math.pi * (1 - k) if count == 2 else math.pi / 2 - 2 * math.pi * k / count


def format_title(value: Format) -> str:
    """Return the class and the shape of a format."""
    return f"{type(value).__name__}, {shorten(value.shape, ' x ')}"
