"""Orthogonal iteration after the higher-order SVD."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

import tnlib


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_orthogonal_iteration_lowers_the_error_to_a_stationary_point(dtype: np.dtype) -> None:
    x = oracles.normal((6, 7, 8), dtype)
    errors = [tnlib.tucker(x, ranks=2, n_iter=n).error for n in (0, 1, 3, 30)]
    assert errors[1] < errors[0]
    assert errors[2] < errors[1]
    fit = tnlib.tucker(x, ranks=2, n_iter=30)
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert tnlib.tucker(x, ranks=2, n_iter=31).error == pytest.approx(fit.error, rel=1e-3)


@pytest.mark.parametrize("ranks", [(4, 1, 2), (1, 4, 1), (5, 1, 1), (1, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.complex64], ids=str)
def test_ranks_that_the_other_legs_cannot_fill(ranks: tuple[int, ...], dtype: type) -> None:
    x = oracles.normal((5, 5, 4, 3)[: len(ranks)], dtype)
    for n_iter in (0, 1, 3):
        fit = tnlib.tucker(x, ranks=ranks, n_iter=n_iter)
        assert fit.value.ranks == ranks
        oracles.assert_fit(fit, x)
        oracles.assert_gauge(fit.value)


def test_tolerance_and_iteration_together() -> None:
    x = oracles.hilbert((6, 6, 6))
    fit = tnlib.tucker(x, rtol=1e-3, n_iter=2)
    oracles.assert_fit(fit, x, rtol=1e-3)
    assert fit.value.ranks == tnlib.tucker(x, rtol=1e-3).value.ranks
