"""Kinds of nodes are measured from arrays."""

from __future__ import annotations

import numpy as np
import pytest

from tnlib.drawing.node_kinds import array_node, is_copy_tensor, is_diagonal, is_isometric_from, node_kind

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
