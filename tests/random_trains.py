"""Random trains of any shape, bonds, ranks, dtype and scale, and their comparison with an allowance for roundoff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracles
from hypothesis import strategies as st

import tnlib

dtypes = st.sampled_from(oracles.DTYPES)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def train(shape: Any, rank: int, dtype: Any = np.float64, seed: int = 0, log_scale: float = 0.0) -> tnlib.TensorTrain:
    ranks = [1, *[rank] * (len(shape) - 1), 1]
    return tnlib.TensorTrain(oracles.random_cores(shape, ranks, dtype, seed), log_scale=log_scale)


@st.composite
def trains(draw: Any, shape: Sequence[int] | None = None, largest: float = 300.0) -> tnlib.TensorTrain:
    """Any train, of any dtype and centre, scales up to exp(`largest`), whose squares are numbers for the default: bonds
    too large for their legs, ranks lower than the bonds, legs of size 1 and zero trains among them.
    """
    shape = shape or draw(shapes)
    ranks = [1, *(draw(st.integers(1, 6)) for _ in shape[1:]), 1]
    dtype = draw(dtypes)
    cores = oracles.random_cores(shape, ranks, dtype, draw(st.integers(0, 999)))
    zeros = draw(st.sampled_from(["none", "none", "none", "one column", "one column", "all"]))
    if zeros != "none" and (zeros == "all" or len(cores) > 1):
        cores[draw(st.integers(0, len(cores) - 1))][..., -1 if zeros == "one column" else slice(None)] = 0
    scales = [0.0, 1.5, -largest, largest] if dtype in (np.float64, np.complex128) else [0.0, -1.5, 20.0]
    train = tnlib.TensorTrain(cores, log_scale=draw(st.sampled_from(scales)))
    center = draw(st.sampled_from([None, *range(len(shape))]))
    return train if center is None else tnlib.canonicalize(train, center)


def reach(t: Any) -> float:
    """Scale of the roundoff where terms cancel: the norm with moduli for entries of cores."""
    return oracles.norm(oracles.contract(type(t)([np.abs(core) for core in t.cores], log_scale=t.log_scale)))


def assert_is(got: Any, want: Any, dtype: Any, size: float) -> None:
    """Equal up to roundoff; a number where no leg is left."""
    if np.ndim(want) == 0:
        assert isinstance(got, float | complex)
        assert abs(got - want) <= 400 * oracles.eps(dtype) * size
    else:
        assert got.shape == np.shape(want)
        assert oracles.norm(got.full() - want) <= 400 * oracles.eps(dtype) * size


def assert_entries(got: Any, want: Any, dtype: Any, size: float) -> None:
    assert np.shape(got) == np.shape(want)
    assert np.all(np.abs(got - want) <= 200 * oracles.eps(dtype) * size)


SHAPES = [(4, 5, 6, 3), (2,) * 9, (6, 1, 7, 1), (5,), (1, 1, 1), (3, 8)]


def assert_same_tensor(a: Any, b: Any, factor: float = 64) -> None:
    """norm(a - b) is roundoff of their norm, with the scales set aside."""
    left, right = (type(t)(t.cores, exponent=t.exponent - b.exponent) for t in (a, b))
    x, y = oracles.wide(left.full()), oracles.wide(right.full())
    assert oracles.norm(x - y) <= factor * oracles.eps(b.dtype) * len(b.cores) * max(oracles.norm(y), 1e-300)


def unfolding(x: np.ndarray, bond: int) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:bond]), -1)
