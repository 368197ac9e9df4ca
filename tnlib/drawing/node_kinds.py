"""Kinds of nodes, measured from arrays: isometry, unitary, copy tensor, diagonal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.drawing.diagram import Node, Point
from tnlib.linalg.multilinear import matrix_from
from tnlib.linalg.orthogonal import is_isometry

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
