"""concatenate: numpy.concatenate of the dense arrays, and long trains cut and put together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import assert_is, dtypes, reach, shapes, train
from slow_cases import mostly_slow

import tnlib
from tnlib.formats.train.operations import train_entries


@given(
    shapes, st.integers(0, 4), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3), dtypes
)
def test_concatenation(shape: list[int], leg: int, parts: list[tuple[int, int]], dtype: Any) -> None:
    leg %= len(shape)
    trains = [
        train([*shape[:leg], n, *shape[leg + 1 :]], r, dtype, k, [0.0, 5.0, -30.0][k]) for k, (n, r) in enumerate(parts)
    ]
    want = np.concatenate([oracles.wide(oracles.contract(t)) for t in trains], axis=leg)
    for name in (leg, leg - len(shape)):
        got = tnlib.concatenate(trains, name)
        assert got.dtype == dtype
        assert_is(got, want, dtype, math.hypot(*(reach(t) for t in trains)))


def test_a_long_train_is_cut_and_put_together() -> None:
    t = train([2 + k % 31 for k in range(200)], 4)
    t = tnlib.TensorTrain(t.cores, log_scale=-t.log_norm())
    for leg in (0, 30, 199):
        whole = (slice(None),) * leg
        again = tnlib.concatenate([t[(*whole, slice(1))], t[(*whole, slice(1, None))]], leg)
        assert tnlib.distance(again, t) <= 1e-12
        assert tnlib.round(again).value.ranks[50] == 4


T = train((2, 3), 2)
A = tnlib.TTMatrix([np.ones((1, 2, 2, 1))])
REFUSED = [
    (lambda: tnlib.concatenate([T, train((3, 2), 1)]), ValueError, ["concatenate: all legs but leg 0", "train 1"]),
    (lambda: tnlib.concatenate([T, train((2,), 1)]), ValueError, ["concatenate: all legs", "the number of legs"]),
    (lambda: tnlib.concatenate([T], 2), ValueError, ["concatenate: axis must lie between -2 and 1", "2"]),
    (lambda: tnlib.concatenate([T], -3), ValueError, ["concatenate: axis must lie between -2 and 1", "-3"]),
    (lambda: tnlib.concatenate([T, A]), TypeError, ["concatenate: train 1 must be a TensorTrain", "TTMatrix"]),
    (lambda: tnlib.concatenate([]), TypeError, ["concatenate: trains must be a non-empty"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_does_not_fit_is_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "got", *words):
        call()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("scale", mostly_slow([1e-25, 1.0, 1e25], [1e-25]))
def test_many_entries_are_those_of_few(dtype: type, scale: float) -> None:
    """Many rows are multiplied in a loop of their own, with powers of two that leave the range of the dtype."""
    rng = np.random.default_rng(0)
    cores = [dtype(scale) * core for core in tnlib.random.tensor_train((3,) * 12, 5, rng=rng).astype(dtype).cores]
    train, points = tnlib.TensorTrain(cores), rng.integers(0, 3, (3000, 12))
    many, few = train_entries(train, points), [train_entries(train, part) for part in np.array_split(points, 4)]
    mantissas, exponents = (np.concatenate(parts) for parts in zip(*few, strict=True))
    ratio = many[0] * 2.0 ** (many[1] - exponents) / mantissas
    assert np.abs(ratio - 1).max() <= 1e4 * np.finfo(dtype).eps  # of entries that are sums of terms of both signs


@pytest.mark.parametrize("power", [-100, 100])
def test_entries_beyond_the_range_of_products(power: int) -> None:
    """Products of 41 factors of about 1e100 or 1e-100, some of which are zero."""
    rng = np.random.default_rng(3)
    factors = rng.uniform(0.5, 1.0, (41, 6)) * 10.0**power
    factors[5, 2] = 0.0
    blocks = [np.stack([row, 2 * row], axis=1).reshape(1, 6, 2) for row in factors]
    cores = [blocks[0], *(np.concatenate([b, np.zeros_like(b)]) for b in blocks[1:-1]), blocks[-1][:, :, :1]]
    cores[-1] = np.concatenate([cores[-1], np.zeros_like(cores[-1])])
    points = rng.integers(0, 6, (50, 41))
    x, e = train_entries(tnlib.TensorTrain(cores), points)
    chosen = factors[np.arange(41), points]
    zero = points[:, 5] == 2
    assert 0 < zero.sum() < 50
    assert np.array_equal(x == 0, zero)
    logs = np.log2(x[~zero]) + e[~zero]
    assert np.allclose(logs, np.log2(chosen[~zero]).sum(axis=1), rtol=0.0, atol=1e-9)
