"""Trains of any bonds, ranks and scales, and the comparison of two of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
from hypothesis import strategies as st

import tnlib

SHAPES = [(4, 5, 6, 3), (2,) * 9, (6, 1, 7, 1), (5,), (1, 1, 1), (3, 8)]


@st.composite
def trains(draw: st.DrawFn) -> tnlib.TensorTrain:
    """Any train: bonds too large for their legs, ranks lower than the bonds, scales from 1e-150 to 1e150."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    ranks = [1, *(draw(st.integers(1, 6)) for _ in shape[1:]), 1]
    dtype = draw(st.sampled_from(oracles.DTYPES))
    cores = oracles.random_cores(shape, ranks, dtype, draw(st.integers(0, 999)))
    if draw(st.booleans()):
        k = draw(st.integers(0, len(cores) - 1))
        cores[k][..., -1] = 0 if len(cores) > 1 else cores[k][..., -1]
    log_scale = draw(
        st.sampled_from([0.0, 1.5, -345.0, 345.0] if dtype.itemsize >= 8 and dtype != "complex64" else [0])
    )
    return tnlib.TensorTrain(cores, log_scale=log_scale)


def assert_same_tensor(a: Any, b: Any, factor: float = 64) -> None:
    """norm(a - b) is roundoff of their norm, with the scales set aside."""
    left, right = (type(t)(t.cores, exponent=t.exponent - b.exponent) for t in (a, b))
    x, y = oracles.wide(left.full()), oracles.wide(right.full())
    assert oracles.norm(x - y) <= factor * oracles.eps(b.dtype) * len(b.cores) * max(oracles.norm(y), 1e-300)


def unfolding(x: np.ndarray, bond: int) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:bond]), -1)
