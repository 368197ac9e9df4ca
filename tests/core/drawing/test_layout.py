"""Kinds of nodes, measured from arrays, and their positions in chains and fans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tnlib.drawing.layout import (
    ChainRows,
    array_node,
    fan,
    is_copy_tensor,
    is_diagonal,
    is_isometric_from,
    node_kind,
    point_towards,
)

Q = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 3)))[0]
ENDS = [(-1.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.0, -1.0)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_isometries(dtype: type) -> None:
    q = Q.astype(dtype) * (1j if np.issubdtype(dtype, np.complexfloating) else 1)
    assert is_isometric_from(q, (1,))
    assert not is_isometric_from(q, (0,))
    assert is_isometric_from(q.reshape(2, 3, 3).transpose(2, 0, 1), (0,))
    assert not is_isometric_from(1.01 * q, (1,))
    assert node_kind(q, ENDS[:2], (0.0, 0.0)) == ("isometry", (1.0, 0.0))
    assert node_kind(q, ENDS[:2], (0.0, 0.0), is_center=True) == ("matrix", None)


def test_unitaries_between_groups_of_legs() -> None:
    u = np.linalg.qr(np.random.default_rng(1).standard_normal((6, 6)))[0]
    assert node_kind(u, ENDS[:2], (0.0, 0.0)) == ("unitary", None)
    assert node_kind(u.reshape(2, 3, 2, 3), ENDS, (0.0, 0.0)) == ("unitary", None)
    assert array_node("U", u, 1, (0.0, 0.0), (1.0, 0.0)).kind == "unitary"


def test_copy_tensors_and_diagonal_matrices() -> None:
    delta = np.zeros((3, 3, 3))
    delta[(np.arange(3),) * 3] = 1
    assert is_copy_tensor(delta)
    assert not is_copy_tensor(2 * delta)
    assert not is_copy_tensor(np.eye(3))
    assert is_diagonal(np.diag([1.0, 0.0, 3.0]))
    assert not is_diagonal(np.ones((2, 2)))
    assert not is_diagonal(np.eye(3)[:2])
    assert node_kind(delta, ENDS[:3], (0.0, 0.0)) == ("delta", None)


def test_vectors_and_scalars_are_tensors() -> None:
    assert node_kind(np.ones(3), ENDS[:1], (0.0, 0.0)) == ("tensor", None)
    assert node_kind(np.ones(()), [], (0.0, 0.0)) == ("tensor", None)


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (10, 1), (11, 2), (30, 3)])
def test_rows_are_read_like_text(count: int, rows: int) -> None:
    chain = ChainRows.of_cores(count, 1.3, is_operator=False)
    points = [chain.position(k) for k in range(count)]
    assert len({y for _, y in points}) == rows
    assert points == sorted(points, key=lambda p: (-p[1], p[0]))
    for k, (p, q) in enumerate(itertools.pairwise(points)):
        assert len(chain.bond_points(k)) == (0 if p[1] == q[1] else 4)


def test_a_fan_begins_at_the_top_on_both_sides() -> None:
    for angle in (0.0, 3.14159):
        ends = [leg.end for leg in fan(0, (2, 0, 1), (4, 5, 6), (0.0, 0.0), angle)]
        assert [leg.size for leg in fan(0, (2, 0, 1), (4, 5, 6), (0.0, 0.0), angle)] == [6, 4, 5]
        heights = [end[1] for end in ends if end is not None]
        assert heights == sorted(heights, reverse=True)


def test_a_point_towards_its_own_start_is_below() -> None:
    assert point_towards((1.0, 1.0), (4.0, 5.0), 10.0) == (7.0, 9.0)
    assert point_towards((1.0, 1.0), (1.0, 1.0), 0.5) == (1.0, 0.5)
