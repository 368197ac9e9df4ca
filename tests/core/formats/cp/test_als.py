"""Alternating least squares: a sweep solves the normal equations of every factor and never raises the residual."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
from hypothesis import given
from hypothesis import strategies as st

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
