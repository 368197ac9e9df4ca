"""Diagrams of a tensor train, a TT-matrix, and the Vidal form."""

from __future__ import annotations

from collections.abc import Sequence

from tnlib._typing import Array
from tnlib.drawing.diagram import Diagram, Leg, Node, Point
from tnlib.drawing.layout import ChainRows, format_title, is_isometric_from
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal

_MAX_CORES = 30  # longer trains are shortened
_END_CORES = 8  # cores at either end of a shortened train
_STEP = 1.3
_VIDAL_STEP = 1.15  # from a core to its Schmidt values
_VIDAL_ROW = 6
_REACH = 0.75  # length of an open leg


def train_diagram(t: TensorTrain | TTMatrix) -> Diagram:
    """Return the chain of cores: triangles for isometries towards the centre, arrows on their bonds."""
    directions, center = core_directions(t.cores, t.center)
    is_operator = isinstance(t, TTMatrix)
    shown = _shown_cores(len(t.cores), center)
    rows = ChainRows.of_cores(len(shown), _STEP, is_operator=is_operator)
    nodes: list[Node] = []
    legs: list[Leg] = []
    for place, k in enumerate(shown):
        position = rows.position(place)
        if place:
            bond = _bond_before(shown, place)
            # The core whose tip is on this bond decides the arrow.
            towards = place if directions[bond - 1] > 0 else place - 1 if directions[bond] < 0 else None
            via = rows.bond_points(place - 1)
            legs.append(Leg(place - 1, place, f"bond{bond}", t.ranks[bond], via=via, towards=towards))
        if k is None:
            nodes.append(_ellipsis(shown, place, position))
        else:
            tip = (float(directions[k]), 0.0) if directions[k] else None
            nodes.append(Node("isometry" if tip else "tensor", str(k), position, tip))
            legs += _open_legs(place, k, t.cores[k], position, is_operator)
    return Diagram(tuple(nodes), tuple(legs), _title(t))


def vidal_diagram(t: Vidal) -> Diagram:
    """Return the chain of Gammas, with the Schmidt values on the bonds between them."""
    shown = _shown_cores(len(t.gammas), None)
    rows = ChainRows(len(shown), 2.7, 2 * _VIDAL_STEP, _VIDAL_ROW)
    nodes: list[Node] = []
    legs: list[Leg] = []
    previous = 0  # node of the core before
    for place, k in enumerate(shown):
        position = rows.position(place)
        node = len(nodes)
        core = _ellipsis(shown, place, position) if k is None else Node("tensor", f"$\\Gamma_{{{k}}}$", position)
        nodes.append(core)
        if place:
            bond = _bond_before(shown, place)
            x, y = rows.position(place - 1)
            x += _VIDAL_STEP
            via = rows.bond_points(place - 1)
            if via:  # the Schmidt values stand at the end of the row
                via = ((x + 0.6, via[0][1]), (x + 0.6, via[1][1]), *via[2:])
            name, size = f"bond{bond}", t.ranks[bond]
            legs += [Leg(previous, len(nodes), name, size), Leg(len(nodes), node, "", size, via=via)]
            nodes.append(Node("weights", f"$\\Lambda_{{{bond}}}$", (x, y)))
        if k is not None:
            legs += _open_legs(node, k, t.gammas[k], position, False)
        previous = node
    return Diagram(tuple(nodes), tuple(legs), _title(t))


def core_directions(cores: Sequence[Array], center: int | None) -> tuple[list[int], int | None]:
    """Return the direction of the tip of every core, and the centre of the canonical form.

    The direction is measured: 1 for a left-isometric core, whose tip points to the right, -1 for a right-isometric one,
    0 for others. An unknown centre is determined from the cores if possible.
    """
    last = len(cores) - 1
    left = [is_isometric_from(core, (core.ndim - 1,)) for core in cores]
    right = [is_isometric_from(core, (0,)) for core in cores]
    if center is None:
        n_left = next((k for k in range(last) if not left[k]), last)
        n_right = next((k for k in range(last) if not right[last - k]), last)
        if n_left + n_right < last:
            pairs = enumerate(zip(left, right, strict=True))
            return [1 if l and (not r or k < last / 2) else -int(r) for k, (l, r) in pairs], None
        center = n_left
    return [*map(int, left[:center]), 0, *(-int(r) for r in right[center + 1 :])], center


def _title(t: TensorTrain | TTMatrix | Vidal) -> str:
    return format_title(t) + (f", times exp({t.log_scale:.4g})" if t.log_scale else "")


def _shown_cores(count: int, center: int | None) -> list[int | None]:
    """Return the cores to draw, with None for a gap: of a long train, both ends and the neighbours of the centre."""
    if count <= _MAX_CORES:
        return list(range(count))
    middle = () if center is None else range(max(0, center - 1), min(count, center + 2))
    kept = {*range(_END_CORES), *middle, *range(count - _END_CORES, count)}
    kept |= {k for k in range(count) if {k - 1, k + 1} <= kept}  # a gap of one core saves nothing
    shown: list[int | None] = []
    for k in sorted(kept):
        shown += [k] if k == 0 or k - 1 in kept else [None, k]
    return shown


def _bond_before(shown: Sequence[int | None], place: int) -> int:
    """Return the number of the bond between two neighbouring places; of a gap, its first or its last bond."""
    before, k = shown[place - 1], shown[place]
    return k if k is not None else (before or 0) + 1


def _ellipsis(shown: Sequence[int | None], place: int, position: Point) -> Node:
    before, behind = shown[place - 1], shown[place + 1]  # a gap has cores on both sides
    return Node("ellipsis", f"{(behind or 0) - (before or 0) - 1} more", position)


def _open_legs(node: int, k: int, core: Array, position: Point, is_operator: bool) -> list[Leg]:
    x, y = position
    below = Leg(node, None, f"b{k}" if is_operator else f"k{k}", core.shape[-2], (x, y - _REACH))
    return [Leg(node, None, f"k{k}", core.shape[1], (x, y + _REACH)), below] if is_operator else [below]
