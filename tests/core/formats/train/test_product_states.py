"""Product states are outer products of vectors."""

from __future__ import annotations

import functools

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from(oracles.DTYPES), st.integers(0, 99))
def test_they_are_outer_products(shape: list[int], dtype: np.dtype, seed: int) -> None:
    vectors = [oracles.normal((n,), dtype, seed + k) for k, n in enumerate(shape)]
    with oracles.unchanged(*vectors):
        state = tnlib.product_state(vectors)
    assert state.dtype == dtype
    assert set(state.ranks) == {1}
    oracles.assert_close(state.full(), functools.reduce(np.multiply.outer, vectors), dtype)


def test_a_vector_that_is_changed_later_changes_no_state() -> None:
    vector = np.ones(2)
    state = tnlib.product_state([vector, vector])
    vector[0] = 5
    assert np.array_equal(state.full(), np.ones((2, 2)))


def test_rows_of_a_matrix_and_lists_are_vectors() -> None:
    assert np.array_equal(tnlib.product_state(np.eye(2)[[1, 0]]).full(), [[0, 0], [1, 0]])
    assert np.array_equal(tnlib.product_state([[1, 2], [3, 4, 5j]]).full(), np.outer([1, 2], [3, 4, 5j]))


def test_wrong_input_is_refused() -> None:
    with oracles.refused(TypeError, "product_state: vectors must be a non-empty sequence"):
        tnlib.product_state([])
    with oracles.refused(ValueError, "product_state: vectors[1] must have one leg"):
        tnlib.product_state([[1.0], [[1.0]]])
    with oracles.refused(ValueError, "product_state: vectors[0] must be finite"):
        tnlib.product_state([[np.inf]])


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(shapes, st.sampled_from(oracles.DTYPES))
def test_they_are_those_of_numpy(shape: list[int], dtype: np.dtype) -> None:
    for train, array in ((tnlib.ones(shape, dtype), np.ones), (tnlib.zeros(shape, dtype), np.zeros)):
        assert train.dtype == dtype
        assert set(train.ranks) == {1}
        assert np.array_equal(train.full(), array(shape))
    identity = tnlib.eye(shape, dtype)
    assert identity.dtype == dtype
    assert np.array_equal(identity.full(), np.eye(np.prod(shape)))


def test_wrong_shapes_are_refused() -> None:
    with oracles.refused(TypeError, "ones: shape must be a sequence"):
        tnlib.ones(3)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "eye: dtype must be one of float32", "int64"):
        tnlib.eye((2,), np.int64)
    with pytest.raises(tnlib.ArgumentError, match="zeros: shape must be at least 1"):
        tnlib.zeros((2, 0))
