"""Alternating least squares: a sweep solves the normal equations of every factor and never raises the residual."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from slow_cases import mostly_slow

import tnlib


@pytest.mark.parametrize("dtype", mostly_slow([np.float32, np.float64], [np.float32]))
@pytest.mark.parametrize("c", mostly_slow([1.0, 1e-25, 1e25], [1e-25]))
def test_nonnegative_factors(dtype: type, c: float) -> None:
    rng = np.random.default_rng(0)
    factors = [rng.uniform(size=(n, 2)) for n in (4, 5, 6)]
    x = (c * oracles.contract(tnlib.CP(np.ones(2), factors))).astype(dtype)
    with oracles.unchanged(x):
        fit, _ = oracles.quietly(lambda: tnlib.cp(x, 2, constraint="nonnegative"))
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert all((factor >= 0).all() for factor in fit.value.factors)
    assert fit.value.dtype == dtype
    assert fit.error < 0.01


@pytest.mark.parametrize("dtype", mostly_slow([np.float32, np.float64], [np.float64]))
@pytest.mark.parametrize("constraint", ["monotone", "unimodal"])
def test_constrained_columns(constraint: str, dtype: type) -> None:
    rng = np.random.default_rng(0)
    rising = [np.cumsum(rng.random((n, 2)), axis=0) for n in (6, 7, 8)]
    x = np.einsum("ar,br,cr->abc", *rising).astype(dtype)
    fit, _ = oracles.quietly(lambda: tnlib.cp(x, 2, constraint=constraint, n_iter=20))
    oracles.assert_fit(fit, x, tight=False)
    assert fit.error < 0.5
    for factor in fit.value.factors:
        steps = np.diff(factor, axis=0)
        unit = 8 * np.finfo(dtype).eps
        if constraint == "monotone":
            assert (steps >= -unit).all()
        else:  # once a column falls, it never rises again
            assert not (np.maximum.accumulate(steps < -unit, axis=0) & (steps > unit)).any()


def test_nonnegative_factors_of_data_that_are_not() -> None:
    x = oracles.normal((4, 5, 6))
    fit, warned = oracles.quietly(lambda: tnlib.cp(x, 2, constraint="nonnegative"))
    oracles.assert_fit(fit, x)
    oracles.assert_warned(fit, warned)
    assert all((factor >= 0).all() for factor in fit.value.factors)
    assert 0.5 < fit.error <= 1 + 1e-12
