"""Verbs of the CP format beside numpy on the dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib


def random_cp(shape: tuple[int, ...], rank: int, dtype: Any, seed: int) -> tnlib.CP:
    factors = [oracles.normal((n, rank), dtype, seed + k) for k, n in enumerate(shape)]
    return tnlib.CP(oracles.normal((rank,), dtype, seed + 9), factors)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(oracles.DTYPES),
    st.sampled_from(oracles.DTYPES),
    st.integers(0, 999),
)
def test_products_beside_numpy(d: int, r: int, s: int, dtype: np.dtype, other: np.dtype, seed: int) -> None:
    a, b = random_cp((2, 3, 2)[:d], r, dtype, seed), random_cp((3, 1, 2)[:d], s, other, seed + 20)
    x, y = oracles.contract(a), oracles.contract(b)
    for product, want in ((tnlib.kron(a, b), np.kron(x, y)), (tnlib.outer(a, b), np.multiply.outer(x, y))):
        assert isinstance(product, tnlib.CP)
        assert product.dtype == np.result_type(dtype, other)
        assert product.ranks == (r * s,)
        oracles.assert_close(product.full(), want, max(dtype, other, key=oracles.eps), 2000)


@pytest.mark.parametrize("c", [1e-200, 1e200])
def test_intermediate_results_stay_in_range(c: float) -> None:
    plain = random_cp((3, 4, 5), 2, np.float64, 0)
    scaled = tnlib.CP(plain.weights / c, [c * plain.factors[0], c * plain.factors[1], plain.factors[2] / c])
    v = [oracles.normal((n,), seed=n) for n in plain.shape]
    points = np.array([[0, 1, 2], [2, 3, 4]])
    oracles.assert_close(tnlib.entries(scaled, points), tnlib.entries(plain, points))
    assert tnlib.inner(scaled, scaled) == pytest.approx(tnlib.inner(plain, plain), rel=1e-13)
    vectors = {0: v[0] * c, 1: v[1] / c, 2: v[2]}
    assert tnlib.contract(scaled, vectors) == pytest.approx(tnlib.contract(plain, dict(enumerate(v))), rel=1e-12)


def test_a_thousand_legs() -> None:
    t = tnlib.CP([1.0, 1.0], [np.array([[1e3, 0.0], [0.0, 1e3]])] * 1000)
    number = tnlib.contract(t, {k: np.full(2, 1e-3) for k in range(1000)})
    assert number == pytest.approx(2.0, rel=1e-11)
    assert tnlib.inner(t, (1e-3**100) * tnlib.CP(t.weights, [1e-6 * f for f in t.factors])) == pytest.approx(2e-300)


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
