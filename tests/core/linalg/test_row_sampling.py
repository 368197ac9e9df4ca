"""Left spaces from samples of rows: low rank is recognised, and nothing is returned where there is none."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest

from tnlib.linalg.row_sampling import sampled_range


def discarded_by(columns: np.ndarray, a: np.ndarray) -> float:
    """Norm of the part outside of the space of the leading columns, those above roundoff."""
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    u = u[:, s > 1e-13 * s[0]]
    return oracles.norm(oracles.wide(a) - u @ (u.conj().T @ oracles.wide(a)))


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "rank"), [(300, 80, 1), (300, 80, 5), (128, 400, 12), (2000, 40, 3)])
def test_the_range_of_a_matrix_of_low_rank(dtype: np.dtype, m: int, n: int, rank: int) -> None:
    a = oracles.with_spectrum(0.5 ** np.arange(rank), m, n, dtype)
    with oracles.unchanged(a):
        columns = sampled_range(a, limit=1e-3 * oracles.norm(a))
    assert columns.dtype == (np.complex128 if dtype.kind == "c" else np.float64)
    assert rank - 3 <= columns.shape[1] <= 2 * rank + 8
    assert discarded_by(columns, a) <= 1e-3 * oracles.norm(a)
    # a V^H with orthonormal rows V: no column is longer than the matrix, and together they hold nearly all of it
    assert (1 - 1e-5) * oracles.norm(a) <= oracles.norm(columns) <= (1 + 1e-12) * oracles.norm(a)


@pytest.mark.parametrize("limit", [1e-2, 1e-4, 1e-6, 1e-9, 1e-12])
def test_a_sample_is_resolved_to_the_limit(limit: float) -> None:
    a = oracles.with_spectrum(10.0 ** -np.arange(18.0), 400, 200)
    columns = sampled_range(a, limit=limit)
    assert columns is not None
    assert columns.shape[1] <= 24
    assert discarded_by(columns, a) <= limit


@pytest.mark.parametrize("limit", [0.0, 1e-3, 0.5])
def test_no_range_is_returned_without_a_low_rank(limit: float) -> None:
    assert sampled_range(oracles.normal((300, 100)) / math.sqrt(30_000), limit=limit) is None
    assert sampled_range(np.zeros((300, 100)), limit=limit) is None
    assert sampled_range(oracles.normal((100, 3)), limit=limit) is None, "too few columns for a low rank"
    assert sampled_range(np.ones((100, 300)), limit=limit) is None, "too few rows for a sample"


def test_the_same_rows_are_drawn_every_time() -> None:
    a = oracles.with_spectrum(0.1 ** np.arange(6.0), 500, 60)
    np.random.seed(0)  # noqa: NPY002 - the global state is what is watched
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    one, other = (sampled_range(a, limit=1e-4) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
