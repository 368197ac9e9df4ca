"""TT-matrices: products, transposes, entries, rows and columns are those of the dense matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
from hypothesis import given
from hypothesis import strategies as st

import tnlib

sizes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4)


def matrix(legs: list[tuple[int, int]], dtype: Any, seed: int) -> tnlib.TTMatrix:
    rows, columns = zip(*legs, strict=True)
    return tnlib.random.tt_matrix(rows, columns, 2, dtype=dtype, rng=seed)


@given(sizes, st.sampled_from(oracles.DTYPES), st.integers(0, 99))
def test_algebra(legs: list[tuple[int, int]], dtype: np.dtype, seed: int) -> None:
    a = matrix(legs, dtype, seed)
    dense = oracles.contract(a)
    for got, want in ((a.full(), dense), (a.T.full(), dense.T), (a.H.full(), dense.conj().T)):
        oracles.assert_close(got, want, dtype)
    gram = dense.conj().T @ dense
    scale = max(1.0, oracles.norm(dense) ** 2 / max(oracles.norm(gram), 1e-30))
    oracles.assert_close((a.H @ a).full(), gram, dtype, 64 * scale)
    assert max((a.H @ a).ranks) <= max(a.ranks) ** 2
    i, j = seed % a.shape[0], seed % a.shape[1]
    for got, want in ((a[i, j], dense[i, j]), (a[i, :].full().reshape(-1), dense[i]), (a[:, j].full(), dense[:, j])):
        assert np.abs(np.reshape(got, -1) - np.reshape(want, -1)).max() <= 64 * oracles.eps(dtype) * np.abs(dense).max()


@given(sizes, st.integers(0, 99))
def test_a_train_of_fused_legs_comes_back(legs: list[tuple[int, int]], seed: int) -> None:
    a = matrix(legs, np.float64, seed)
    train = tnlib.convert(a, tnlib.TensorTrain)
    assert train.shape == tuple(m * n for m, n in legs)
    oracles.assert_same_bits(tnlib.convert(train, tnlib.TTMatrix, row_shape=a.row_shape), a)
