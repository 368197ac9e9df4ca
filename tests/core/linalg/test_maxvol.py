"""Row and column selection: volumes, bounds, dependent rows."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
import pytest

from tnlib.linalg.maxvol import maxvol, pivots


def volume(a: np.ndarray) -> float:
    return float(abs(np.linalg.det(oracles.wide(a))))


@oracles.each_dtype
@pytest.mark.parametrize(("m", "r"), [(12, 3), (40, 8), (5, 5), (7, 1), (200, 20)])
@pytest.mark.parametrize("bound", [1.01, 2.0, 10.0])
def test_no_entry_of_the_interpolation_exceeds_the_bound(m: int, r: int, bound: float, dtype: np.dtype) -> None:
    a = oracles.normal((m, r), dtype, seed=m + r)
    with oracles.unchanged(a):
        rows, interpolation = maxvol(a, np.arange(r), bound=bound)
    assert len(set(rows.tolist())) == r
    assert np.abs(interpolation).max() <= bound
    assert volume(a[rows]) >= volume(a[:r]) * (1 - 1e-3)
    np.testing.assert_array_equal(interpolation[rows], np.eye(r))
    oracles.assert_close(interpolation @ a[rows], a, dtype, factor=1000 * r)


def test_the_volume_is_within_a_factor_of_the_largest() -> None:
    """Entries below b mean a volume of at least the largest over (b sqrt(r))^r."""
    for seed in range(20):
        a = oracles.normal((9, 3), seed=seed)
        rows, _ = maxvol(a, np.arange(3), bound=1.01)
        largest = max(volume(a[list(some)]) for some in itertools.combinations(range(9), 3))
        assert volume(a[rows]) >= largest / (1.01 * np.sqrt(3)) ** 3


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_scale(scale: float) -> None:
    a = oracles.normal((30, 5))
    rows, interpolation = maxvol(a * scale, np.arange(5), bound=2.0)
    np.testing.assert_array_equal(rows, maxvol(a, np.arange(5), bound=2.0)[0])
    oracles.assert_close(interpolation, maxvol(a, np.arange(5), bound=2.0)[1], factor=1e4)


@pytest.mark.parametrize("kind", ["equal", "zero", "nearly"])
def test_dependent_rows_to_begin_with_are_refused(kind: str) -> None:
    a = oracles.normal((12, 3))
    a[1] = {"equal": a[0], "zero": 0 * a[0], "nearly": a[0] * (1 + 1e-15)}[kind]
    assert maxvol(a, np.arange(3), bound=2.0) is None


@oracles.each_dtype
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_pivots_find_the_rank(rank: int, dtype: np.dtype) -> None:
    a = oracles.with_spectrum(np.linspace(1, 0.5, rank), 20, 15, dtype, seed=rank)
    with oracles.unchanged(a):
        rows, columns = pivots(a, least=100 * oracles.eps(dtype), most=15)
    assert len(rows) == len(columns) == rank
    skeleton = a[:, columns] @ np.linalg.solve(a[np.ix_(rows, columns)], a[rows])
    oracles.assert_close(skeleton, a, dtype, factor=1e4)


def test_the_schur_complement_is_below_the_threshold() -> None:
    for seed in range(10):
        a = oracles.with_spectrum(0.5 ** np.arange(12), 25, 18, seed=seed)
        rows, columns = pivots(a, least=1e-2, most=12)
        rest = a - a[:, columns] @ np.linalg.solve(a[np.ix_(rows, columns)], a[rows])
        assert np.abs(rest).max() <= 1e-2
        assert 2 <= len(rows) < 12
