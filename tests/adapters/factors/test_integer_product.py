"""Values of stored integers and products with them, beside numpy's with the values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import normal
from slow_cases import mostly_slow
from tnlib_adapters.factors import integer_product
from tnlib_adapters.factors.integer_product import IntegerMatrix
from tnlib_adapters.factors.integers import BITS, IntegerFormat
from tnlib_adapters.factors.rounding import round_to_nearest


@pytest.mark.parametrize("bits", mostly_slow(BITS, quick=(3, 4, 8)))  # kernels of each width are compiled
@given(
    group=st.sampled_from([0, 8, 20, 64]),
    has_zero=st.booleans(),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 150)),
    n_vectors=st.integers(1, 3),
)
def test_values_and_products_of_stored_integers(
    bits: int, group: int, has_zero: bool, shape: tuple[int, int], n_vectors: int
) -> None:
    m, n = shape
    form = IntegerFormat(bits, axis=1, group=group, has_zero=has_zero)
    rounded = round_to_nearest(normal(shape, seed=0).astype(np.float32), form, search=False)
    matrix = IntegerMatrix(rounded.stored(), rounded.scales.T, form, n)
    assert np.array_equal(matrix.values(), rounded.values())
    values = rounded.values(np.float64)

    x, y = (normal((n_vectors, length), seed=1).astype(np.float32) for length in (n, m))
    for product, vectors, a in (
        (matrix.times_rows(x), x, values.T),
        (matrix.times_columns(y), y, values),
    ):
        assert product.dtype == np.float32
        rounding = (len(a) + 8) * np.finfo(np.float32).eps  # of a sum in any order
        assert np.all(np.abs(product - vectors @ a) <= rounding * (np.abs(vectors) @ np.abs(a)))


def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    form = IntegerFormat(4, axis=1, group=32)
    rounded = round_to_nearest(normal((37, 70), seed=0).astype(np.float32), form, search=False)
    matrix = IntegerMatrix(rounded.stored(), rounded.scales.T, form, 70)
    x, y = np.ones((2, 70), np.float32), np.ones((2, 37), np.float32)
    whole = matrix.values(), matrix.times_rows(x), matrix.times_columns(y)
    monkeypatch.setattr(integer_product, "_LARGE", 1)
    monkeypatch.setattr(integer_product, "thread_count", lambda: 3)
    shared = matrix.values(), matrix.times_rows(x), matrix.times_columns(y)
    assert all(map(np.array_equal, shared[:2], whole[:2]))
    assert np.allclose(shared[2], whole[2], rtol=1e-5)
