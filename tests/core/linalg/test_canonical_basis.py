"""Canonical bases: leading entries, ties, groups of equal values, and changes of basis."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

from tnlib.linalg.canonical_basis import (
    canonical_basis_change,
    equal_groups,
    equality_tolerance,
    group_basis_change,
    leading_phases,
)


def test_the_first_of_tied_entries_leads() -> None:
    u = np.array([[-1.0, 0.5], [1.0 + 1e-12, -1.0], [-1.0 - 2e-12, 1.0 + 1e-14]])
    np.testing.assert_array_equal(leading_phases(u), [-1, -1])
    np.testing.assert_array_equal(leading_phases(np.array([[-1.0], [1.001]])), [1])
    np.testing.assert_array_equal(leading_phases(np.array([[-1.0], [1.0001]]), np.dtype(np.float32)), [-1])
    np.testing.assert_array_equal(leading_phases(np.array([[-0.0, -2.0]])), [1, -1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_groups_of_equal_values(dtype: type) -> None:
    s = np.array([3, 2, 2, 1, 1, 1, 0.5, 0, 0], dtype)
    want = [slice(1, 3), slice(3, 6), slice(7, 9)]
    assert equal_groups(s, 1e-9) == want
    assert equal_groups(s, np.full(9, 1e-9)) == want
    assert equal_groups(s, equality_tolerance(s, s.dtype)) == want
    assert equal_groups(s, 10.0) == [slice(0, 9)]
    assert equal_groups(s[:1], 1e-9) == equal_groups(s[:0], 1e-9) == []
    assert equal_groups(np.array([3.0, 2.5, 2.0]), np.array([0.4, 0.6, 0.0])) == [slice(1, 3)]


def test_tolerances_of_equality() -> None:
    s = np.array([3.0, 4e-3, 1e-9])
    double = equality_tolerance(s, np.dtype(np.float64))
    assert 0 < equality_tolerance(s, s.dtype, diagonal=True) < double
    assert equality_tolerance(s, np.dtype(np.float32)) > 1e8 * double
    squared = equality_tolerance(s, s.dtype, squared=True)
    assert squared.shape == (3,)
    assert squared[0] == pytest.approx(2 * double, rel=1e-6)
    assert squared[2] > 1e6 * squared[0]
    assert equality_tolerance(np.zeros(3), s.dtype) == equality_tolerance(np.zeros(0), s.dtype) == 0
    assert not np.any(equality_tolerance(np.zeros(3), s.dtype, squared=True))


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_a_change_of_basis_is_unitary_and_acts_on_both_sides(dtype: np.dtype) -> None:
    u, a = oracles.isometry(8, 5, dtype).astype(dtype), oracles.normal((5, 7), dtype)
    s = np.array([3, 2, 2, 2, 1], np.zeros(0, dtype).real.dtype)
    with oracles.unchanged(u, a):
        change = canonical_basis_change(u, s, dtype)
        fixed, rows = change.columns(u), change.rows(a)
    assert fixed.dtype == rows.dtype == dtype
    oracles.assert_isometric(fixed)
    oracles.assert_close(fixed @ rows, u @ a, dtype)
    oracles.assert_signs(fixed[:, [0, 4]])


def test_the_basis_of_a_whole_space_is_the_identity() -> None:
    u = oracles.isometry(4, 4)
    oracles.assert_close(group_basis_change(u, [slice(0, 4)]).columns(u), np.eye(4))


def test_bases_whose_pivot_rows_are_nearly_parallel_are_orthonormal() -> None:
    """The pivots have one large entry in common, and what is left of each is a hundredth of it."""
    m, r = 40_000, 10
    x = np.sign(oracles.normal((m, r)))
    x[:r], x[:, 0] = 2 * oracles.normal((r, r), seed=1), 0
    x[:r, 0] = np.sqrt(m)
    u = np.linalg.qr(x)[0] @ oracles.isometry(r, r)
    basis = group_basis_change(u, [slice(0, r)]).columns(u)
    assert np.linalg.norm(basis.T @ basis - np.eye(r)) < 64 * oracles.eps(np.float64)
