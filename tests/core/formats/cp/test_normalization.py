"""The canonical form of a CP does not depend on the scales, signs and order of its components."""

from __future__ import annotations

import numpy as np
import oracles
from hypothesis import given
from hypothesis import strategies as st

import tnlib


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(oracles.DTYPES), st.integers(0, 99))
def test_any_gauge_gives_one_form(d: int, rank: int, dtype: np.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    t = tnlib.random.cp((3, 4, 5, 2)[:d], rank, dtype=dtype, rng=rng)
    order, scales = rng.permutation(rank), rng.choice([-2.0, -0.5, 0.5, 2.0], (d, rank)).astype(dtype)
    factors = [factor[:, order] * scale for factor, scale in zip(t.factors, scales, strict=True)]
    other = tnlib.CP(t.weights[order] / scales.prod(axis=0), factors)
    a, b = tnlib.canonical_form(t), tnlib.canonical_form(other)
    tolerance = 64 * oracles.eps(dtype)
    for x, y in zip(a.arrays(), b.arrays(), strict=True):
        assert np.abs(x - y).max() <= tolerance * np.abs(x).max()
    assert (a.weights >= 0).all()
    assert (np.diff(a.weights) <= 0).all()
    for factor in a.factors:
        assert np.abs(np.linalg.norm(factor, axis=0) - 1).max() <= tolerance
    assert oracles.norm(oracles.wide(a.full()) - t.full()) <= 4 * tolerance * np.abs(t.weights).sum() * 50
