"""Alternating least squares: a sweep solves the normal equations of every factor and never raises the residual."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib
from tnlib.formats.cp.als import als, cp_residual
from tnlib.linalg.multilinear import khatri_rao, unfold


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_sweeps_lower_the_residual(shape: list[int], rank: int, is_complex: bool, seed: int) -> None:
    dtype = np.complex128 if is_complex else np.float64
    x = oracles.normal(shape, dtype, seed)
    factors = [oracles.normal((n, rank), dtype, seed + k) for k, n in enumerate(shape, 1)]
    size = oracles.norm(x)
    residuals = [als(x, size, factors, n_iter=n, target=0.0, slow=0.0).residual for n in (1, 2, 4)]
    assert all(b <= a + 1e-6 * size for a, b in itertools.pairwise(residuals))
    result = als(x, size, factors, n_iter=2, target=0.0, slow=0.0)
    assert abs(result.residual - cp_residual(x, result.factors)) <= 1e-5 * size
    best = np.linalg.lstsq(khatri_rao(result.factors[:-1]), unfold(x, x.ndim - 1).T, rcond=None)[0]
    assert (
        result.residual <= oracles.norm(unfold(x, x.ndim - 1).T - khatri_rao(result.factors[:-1]) @ best) + 1e-5 * size
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("c", [1.0, 1e-25, 1e25])
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
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
