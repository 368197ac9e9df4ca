"""Diagrams of what has one middle: SVD, LowRank, Tucker, CP, a dense array."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tnlib._fit import shorten
from tnlib._typing import Array
from tnlib.drawing.graph import Diagram, Leg, Node, Point
from tnlib.formats.cp import CP
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.tucker import Tucker
from tnlib.network.special import is_isometry

_STEP = 1.5
_REACH = 1.0  # of open legs


def of_svd(value: SVD) -> Diagram:
    """Describe U, the singular values and V^H in a row, each side with its legs."""
    right = [k for k in range(len(value.shape)) if k not in (value.left or ())]
    r = len(value.s)
    nodes = (
        piece("U", value.u, -1, (0.0, 0.0), (1.0, 0.0)),
        Node("weights", "s", (_STEP, 0.0)),
        piece("V$^H$", value.vh, 0, (2 * _STEP, 0.0), (-1.0, 0.0)),
    )
    inner = (Leg(0, 1, "r", r, towards=1), Leg(1, 2, "", r, towards=1))
    legs = fan(0, value.left or (), value.shape, (0.0, 0.0), math.pi)
    return Diagram(nodes, (*inner, *legs, *fan(2, right, value.shape, (2 * _STEP, 0.0), 0.0)), _title(value))


def of_low_rank(value: LowRank) -> Diagram:
    """Describe two matrices and what they share."""
    nodes = (
        piece("left", value.left, 1, (0.0, 0.0), (1.0, 0.0)),
        piece("right", value.right, 0, (_STEP, 0.0), (-1.0, 0.0)),
    )
    legs = (
        Leg(0, 1, "r", value.ranks[0]),
        Leg(0, None, "k0", value.shape[0], (-_REACH, 0.0)),
        Leg(1, None, "b0", value.shape[1], (_STEP + _REACH, 0.0)),
    )
    return Diagram(nodes, legs, _title(value))


def of_tucker(value: Tucker) -> Diagram:
    """Describe the core and, around it, the factors: triangles where their columns are orthonormal."""
    nodes = [Node("tensor", "core", (0.0, 0.0))]
    return _star(nodes, value.factors, value.ranks, "r{}", _title(value))


def of_cp(value: CP) -> Diagram:
    """Describe the copy tensor and, around it, the factors and the weights."""
    nodes = [Node("delta", "", (0.0, 0.0))]
    ranks = value.ranks * len(value.factors)
    return _star(nodes, value.factors, ranks, "R", _title(value), weights=True)


def of_array(a: Array) -> Diagram:
    """Describe a dense tensor: one shape and its legs."""
    kind = "matrix" if a.ndim == 2 else "tensor"
    at = (0.0, 0.0)
    if a.ndim == 2:
        legs = [*fan(0, (0,), a.shape, at, math.pi), *fan(0, (1,), a.shape, at, 0.0)]
    else:
        turn = [_angle(k, a.ndim) for k in range(a.ndim)]
        legs = [leg for k in range(a.ndim) for leg in fan(0, (k,), a.shape, at, turn[k])]
    return Diagram((Node(kind, "", at),), tuple(legs), f"{shorten(a.shape, ' x ')}, dense")


def piece(label: str, a: Array, tip: int, at: Point, direction: Point) -> Node:
    """Return the node of an array as it is measured: an isometry from leg `tip`, a unitary, or neither."""
    if not is_isometry(a, tip):
        return Node("matrix" if a.ndim == 2 else "tensor", label, at)
    square = a.shape[tip] ** 2 == a.size
    return Node("unitary", label, at) if square else Node("isometry", label, at, direction)


def fan(node: int, legs: Sequence[int], shape: Sequence[int], at: Point, angle: float) -> list[Leg]:
    """Return the open legs `legs` of a node, side by side around one angle; the first is the topmost."""
    spread = min(math.pi / 5, math.pi * 0.8 / max(1, len(legs) - 1))
    side = -1 if math.cos(angle) >= 0 else 1
    turns = [angle + side * spread * (j - (len(legs) - 1) / 2) for j in range(len(legs))]
    return [
        Leg(node, None, f"k{k}", shape[k], (at[0] + _REACH * math.cos(t), at[1] + _REACH * math.sin(t)))
        for k, t in zip(legs, turns, strict=True)
    ]


def _star(
    nodes: list[Node], factors: Sequence[Array], ranks: Sequence[int], bond: str, title: str, weights: bool = False
) -> Diagram:
    """Put the factors on a circle around the one node that is there, and the weights, where there are any, on top."""
    count = len(factors) + weights
    radius = max(_STEP, 1.15 * count / (2 * math.pi))
    legs: list[Leg] = []
    for k, factor in enumerate(factors):
        angle = _angle(k + weights, count)
        x, y = math.cos(angle), math.sin(angle)
        nodes.append(piece(str(k), factor, 1, (radius * x, radius * y), (-x, -y)))
        isometric = nodes[-1].kind in ("isometry", "unitary")
        towards = 0 if isometric and not weights else None
        legs.append(Leg(len(nodes) - 1, 0, bond.format(k), ranks[k], towards=towards))
        far = radius + _REACH
        legs.append(Leg(len(nodes) - 1, None, f"k{k}", len(factor), (far * x, far * y)))
    if weights:
        angle = _angle(0, count)
        nodes.append(Node("weights", "w", (radius * math.cos(angle), radius * math.sin(angle))))
        legs.append(Leg(len(nodes) - 1, 0, bond, ranks[0]))
    return Diagram(tuple(nodes), tuple(legs), title)


def _angle(k: int, count: int) -> float:
    """Return where the k-th of several stands on a circle: clockwise, the first on top, two of them side by side."""
    return math.pi * (1 - k) if count == 2 else math.pi / 2 - 2 * math.pi * k / count


def _title(value: SVD | LowRank | Tucker | CP) -> str:
    return f"{type(value).__name__}, {shorten(value.shape, ' x ')}"
