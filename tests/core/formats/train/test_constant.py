"""Constant trains and the identity, of every dtype."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib

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


def test_wrong_input_is_refused() -> None:
    with oracles.refused(TypeError, "ones: shape must be a sequence"):
        tnlib.ones(3)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "eye: dtype must be one of float32", "int64"):
        tnlib.eye((2,), np.int64)
    with pytest.raises(tnlib.ArgumentError, match="zeros: shape must be at least 1"):
        tnlib.zeros((2, 0))
