"""Verbs of the Tucker format beside numpy on the dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib


def random_tucker(shape: tuple[int, ...], ranks: tuple[int, ...], dtype: Any, seed: int) -> tnlib.Tucker:
    factors = [oracles.normal((n, r), dtype, seed + k) for k, (n, r) in enumerate(zip(shape, ranks, strict=True))]
    return tnlib.Tucker(oracles.normal(ranks, dtype, seed + 9), factors)


@given(st.integers(1, 3), st.sampled_from(oracles.DTYPES), st.sampled_from(oracles.DTYPES), st.integers(0, 999))
def test_products_beside_numpy(d: int, dtype: np.dtype, other: np.dtype, seed: int) -> None:
    a = random_tucker((2, 3, 2)[:d], (2, 1, 3)[:d], dtype, seed)
    b = random_tucker((3, 1, 2)[:d], (1, 2, 2)[:d], other, seed + 20)
    x, y = oracles.contract(a), oracles.contract(b)
    for product, want in ((tnlib.kron(a, b), np.kron(x, y)), (tnlib.outer(a, b), np.multiply.outer(x, y))):
        assert isinstance(product, tnlib.Tucker)
        assert product.dtype == np.result_type(dtype, other)
        oracles.assert_close(product.full(), want, max(dtype, other, key=oracles.eps), 500)
    assert tnlib.kron(a, b).ranks == tuple(np.multiply(a.ranks, b.ranks))
    assert tnlib.outer(a, b).ranks == a.ranks + b.ranks


def test_an_outer_product_with_too_many_legs_is_refused() -> None:
    t = tnlib.Tucker(np.ones((1,) * 40), [np.ones((2, 1))] * 40)
    with oracles.refused(ValueError, "outer: the core of a Tucker", "64 legs", "80", "TensorTrain"):
        tnlib.outer(t, t)


@pytest.mark.parametrize("c", [1e-200, 1e200])
def test_intermediate_results_stay_in_range(c: float) -> None:
    plain = random_tucker((3, 4, 5), (2, 3, 2), np.float64, 0)
    scaled = tnlib.Tucker(plain.core / c, [c * plain.factors[0], *plain.factors[1:]])
    v = [oracles.normal((n,), seed=n) for n in plain.shape]
    assert tnlib.inner(scaled, scaled) == pytest.approx(tnlib.inner(plain, plain), rel=1e-13)
    vectors = {0: v[0] * c, 1: v[1] / c, 2: v[2]}
    assert tnlib.contract(scaled, vectors) == pytest.approx(tnlib.contract(plain, dict(enumerate(v))), rel=1e-12)
    oracles.assert_close(tnlib.round(scaled).value.full(), plain.full(), factor=400)
