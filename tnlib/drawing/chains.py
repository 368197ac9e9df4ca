"""Diagrams of trains: TensorTrain, TTMatrix, Vidal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tnlib._fit import shorten
from tnlib._typing import Array
from tnlib.drawing.graph import Diagram, Leg, Node, Point
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.vidal import Vidal
from tnlib.network.special import is_isometry

_PER_ROW = 10
_MOST = 30  # more cores than these are not all drawn
_ENDS = 8  # cores that are drawn at either end of a longer train
_STEP = 1.3
_VIDAL_STEP = 1.15  # from a core to its Schmidt values
_REACH = 0.75  # of open legs


@dataclass(frozen=True)
class Places:
    """Where the cores of a chain stand: rows of equal length, read like text."""

    count: int
    row_height: float
    step: float = _STEP
    most: int = _PER_ROW
    between: float = 0.58  # where the way to the next row runs, as part of the height: below the labels of open legs

    @property
    def per_row(self) -> int:
        """How many stand in a row."""
        rows = math.ceil(self.count / self.most)
        return math.ceil(self.count / rows)

    def at(self, k: int) -> Point:
        """Return where the k-th stands."""
        row, column = divmod(k, self.per_row)
        return column * self.step, -row * self.row_height

    def way(self, k: int) -> tuple[Point, ...]:
        """Return the points that the bond between places k and k + 1 passes: none, or the way to the next row."""
        (x, y), (x_next, y_next) = self.at(k), self.at(k + 1)
        if y == y_next:
            return ()
        middle = y - self.between * self.row_height
        right, left = x + 0.6, x_next - 0.6
        return (right, y), (right, middle), (left, middle), (left, y_next)


def of_train(value: TensorTrain | TTMatrix) -> Diagram:
    """Describe a train: triangles for the cores that are isometric towards the centre, arrows on their bonds."""
    signs, center = core_directions(value.cores, value.center)
    operator = isinstance(value, TTMatrix)
    shown = _shown(len(value.cores), center)
    places = Places(len(shown), 3.5, between=0.5) if operator else Places(len(shown), 2.7)
    nodes: list[Node] = []
    legs: list[Leg] = []
    for place, k in enumerate(shown):
        at = places.at(place)
        if k is None:
            nodes.append(Node("ellipsis", f"{_left_out(shown, place)} more", at))
        else:
            nodes.append(_core(signs[k], str(k), at))
            legs += _open_legs(place, k, value.cores[k], at, operator)
        if place:
            legs.append(_bond(value.ranks, signs, shown, place, places.way(place - 1)))
    return Diagram(tuple(nodes), tuple(legs), title_of(value, value.log_scale))


def of_vidal(value: Vidal) -> Diagram:
    """Describe Gammas and, on the bonds between them, the Schmidt values."""
    shown = _shown(len(value.gammas), None)
    sizes = (1, *(len(s) for s in value.lambdas), 1)
    places = Places(len(shown), 2.7, 2 * _VIDAL_STEP, 6)
    nodes: list[Node] = []
    legs: list[Leg] = []
    before = 0  # number of the node that the next bond starts from
    for place, k in enumerate(shown):
        at = places.at(place)
        here = len(nodes)
        nodes.append(Node("ellipsis", f"{_left_out(shown, place)} more", at) if k is None else _gamma(k, at))
        if k is not None:
            legs += _open_legs(here, k, value.gammas[k], at, False)
        if place:
            bond = k if k is not None else (shown[place - 1] or 0) + 1
            legs += _lambda_between(nodes, before, here, bond, sizes[bond], places, place)
        before = here
    return Diagram(tuple(nodes), tuple(legs), title_of(value, value.log_scale))


def core_directions(cores: Sequence[Array], center: int | None) -> tuple[list[int], int | None]:
    """Measure which cores are isometries: 1 where one points to the right, -1 to the left, 0 elsewhere; and the centre.

    A centre that is named decides which side is measured; otherwise it is found where the cores tell it.
    """
    if center is not None:
        return [_sign(core, k, center) for k, core in enumerate(cores)], center
    last = len(cores) - 1
    right = [is_isometry(core, core.ndim - 1) for core in cores]  # from the right bond into (l, n)
    left = [is_isometry(core, 0) for core in cores]
    n_right = next((k for k in range(last) if not right[k]), last)
    n_left = next((k for k in range(last) if not left[last - k]), last)
    if n_right + n_left >= last:
        return [1 if k < n_right else -1 if k > n_right else 0 for k in range(last + 1)], n_right
    pairs = enumerate(zip(right, left, strict=True))
    return [1 if r and (not l or k < last / 2) else -int(l) for k, (r, l) in pairs], None


def _sign(core: Array, k: int, center: int) -> int:
    """Return which way core k points, if it is the isometry towards the centre that it should be."""
    if k == center:
        return 0
    return int(is_isometry(core, core.ndim - 1)) if k < center else -int(is_isometry(core, 0))


def title_of(value: TensorTrain | TTMatrix | Vidal, log_scale: float) -> str:
    """Return the kind and the shape, and the scale where there is one."""
    scale = f", times exp({log_scale:.4g})" if log_scale else ""
    return f"{type(value).__name__}, {shorten(value.shape, ' x ')}{scale}"


def _shown(count: int, center: int | None) -> list[int | None]:
    """Return the cores that are drawn, None for each gap: both ends of a long train, and what is around its centre."""
    if count <= _MOST:
        return list(range(count))
    middle = () if center is None else range(max(0, center - 1), min(count, center + 2))
    kept = sorted({*range(_ENDS), *middle, *range(count - _ENDS, count)})
    out: list[int | None] = []
    for k in kept:
        gap = k - out[-1] - 1 if out and out[-1] is not None else 0
        out += [k - 1] if gap == 1 else [None] if gap else []
        out.append(k)
    return out


def _left_out(shown: Sequence[int | None], place: int) -> int:
    before, behind = shown[place - 1], shown[place + 1]  # gaps have cores on both sides
    return (behind or 0) - (before or 0) - 1


def _core(sign: int, label: str, at: Point) -> Node:
    return Node("isometry", label, at, (float(sign), 0.0)) if sign else Node("tensor", label, at)


def _gamma(k: int, at: Point) -> Node:
    return Node("tensor", f"$\\Gamma_{{{k}}}$", at)


def _open_legs(node: int, k: int, core: Array, at: Point, operator: bool) -> list[Leg]:
    x, y = at
    if operator:
        up = Leg(node, None, f"k{k}", core.shape[1], (x, y + _REACH))
        return [up, Leg(node, None, f"b{k}", core.shape[2], (x, y - _REACH))]
    return [Leg(node, None, f"k{k}", core.shape[1], (x, y - _REACH))]


def _bond(
    ranks: Sequence[int], signs: Sequence[int], shown: Sequence[int | None], place: int, way: tuple[Point, ...]
) -> Leg:
    before, behind = shown[place - 1], shown[place]
    bond = behind if behind is not None else (before or 0) + 1
    # the core whose tip is on this bond says where it points
    towards = place if signs[bond - 1] > 0 else place - 1 if signs[bond] < 0 else None
    return Leg(place - 1, place, f"bond{bond}", ranks[bond], via=way, towards=towards)


def _lambda_between(
    nodes: list[Node], before: int, here: int, bond: int, size: int, places: Places, place: int
) -> list[Leg]:
    """Add the diamond of a bond to `nodes`, and return its two legs; on the way to another row it stands at the end."""
    way = places.way(place - 1)
    x, y = places.at(place - 1)
    nodes.append(Node("weights", f"$\\Lambda_{{{bond}}}$", (x + _VIDAL_STEP, y)))
    if way:
        (_, y_right), (_, middle), (left, _), _ = way
        right = x + _VIDAL_STEP + 0.6
        way = (right, y_right), (right, middle), (left, middle), (left, places.at(place)[1])
    name = f"bond{bond}"
    return [Leg(before, len(nodes) - 1, name, size), Leg(len(nodes) - 1, here, "", size, via=way)]
