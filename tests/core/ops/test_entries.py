"""entries: the entries of the dense array at many indices, and known values where no dense array fits."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import assert_entries, reach, trains

import tnlib


@given(trains(), st.integers(0, 999), st.sampled_from([(), (1,), (7,), (0,), (2, 3)]))
def test_entries_of_trains(t: tnlib.TensorTrain, seed: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    points = np.stack([rng.integers(-n, n, shape) for n in t.shape], axis=-1)
    got, dense = tnlib.entries(t, points), oracles.wide(oracles.contract(t))
    assert got.dtype == t.dtype
    assert_entries(got, dense[tuple(np.moveaxis(points, -1, 0))], t.dtype, reach(t))


@pytest.mark.parametrize("value", oracles.ALL_FORMATS, ids=oracles.format_id)
def test_entries_of_every_format_that_has_a_train(value: Any) -> None:
    if isinstance(value, tnlib.KroneckerTerms) or (isinstance(value, tnlib.SVD) and value.u.ndim > 2):
        return
    dense = oracles.contract(value)
    points = np.stack(np.meshgrid(*map(np.arange, value.shape), indexing="ij"), axis=-1)
    want = dense
    if isinstance(value, tnlib.TTMatrix):
        sizes = [*value.row_shape, *value.col_shape]
        d = len(value.cores)
        digits = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), axis=-1)
        points, want = np.stack([digits[..., :d], digits[..., d:]], axis=-1), dense.reshape(sizes)
    oracles.assert_close(tnlib.entries(value, points), want, value.dtype, 200)


def test_entries_of_200_cores() -> None:
    d, n = 200, 32
    rng = np.random.default_rng(0)
    legs = [1 + rng.random(n) for _ in range(d)]
    train = tnlib.TensorTrain([leg.reshape(1, -1, 1) for leg in legs], log_scale=-50.0)
    points = rng.integers(0, n, (500, d))
    logs = np.array([math.fsum(np.log(legs[k][i]) for k, i in enumerate(row)) for row in points])
    np.testing.assert_allclose(tnlib.entries(train, points), np.exp(logs - 50), rtol=1e-11)
    cp = tnlib.CP([2.0], [leg[:, None] for leg in legs])
    np.testing.assert_allclose(tnlib.entries(cp, points), 2 * np.exp(logs), rtol=1e-11)
    deltas = sum(tnlib.TensorTrain([np.eye(n)[i].reshape(1, -1, 1) for i in row]) for row in points[:20])
    hit = tnlib.entries(deltas, points)
    np.testing.assert_allclose(hit, np.arange(500) < 20, atol=1e-12)


def test_entries_far_from_one_keep_their_digits() -> None:
    for size in (1e-30, 1e30):
        legs = [np.array([1.0, size], np.float32).reshape(1, -1, 1)] * 100
        points = np.array([[1] * 50 + [0] * 50, [0] * 100, [1] * 100])
        got = tnlib.entries(tnlib.TensorTrain(legs, log_scale=-50 * math.log(float(np.float32(size)))), points[:1])
        np.testing.assert_allclose(got, [1], rtol=1e-4)
    with oracles.refused(ValueError, "entries: every entry", "float32", "log_scale"):
        tnlib.entries(tnlib.TensorTrain(legs), points)


def test_many_entries_take_bounded_memory() -> None:
    train = tnlib.TensorTrain(oracles.random_cores((4,) * 20, (1, *[64] * 19, 1)))
    points = np.random.default_rng(0).integers(0, 4, (100_000, 20))
    tracemalloc.start()
    tnlib.entries(train, points)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < points.nbytes * 2 + 8 * 64 * len(points)  # less than one row for each point, and two indices


T = tnlib.TensorTrain([np.ones((1, 2, 3)), np.ones((3, 4, 1))])
A = tnlib.TTMatrix([np.ones((1, 2, 2, 1)), np.ones((1, 3, 4, 1))])

REFUSED = [
    (lambda: tnlib.entries(T, [[0, 4]]), ValueError, ["entries: indices of leg 1", "-4 and 3", "got 4", "point 0"]),
    (lambda: tnlib.entries(T, [[0, 1, 2]]), ValueError, ["entries: indices must have shape (..., 2)", "(1, 3)"]),
    (lambda: tnlib.entries(T, [[0.0, 1.0]]), TypeError, ["entries: indices must be integers", "float64"]),
    (lambda: tnlib.entries(T, 0), ValueError, ["entries: indices must have shape (..., 2)", "()"]),
    (lambda: tnlib.entries(A, [[0, 0]]), ValueError, ["entries: indices must have shape (..., 2, 2)", "(1, 2)"]),
    (lambda: tnlib.entries(np.ones((2, 2)), [[0, 0]]), TypeError, ["entries: t must", "ndarray"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_impossible_indices_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, *words):
        call()


def test_no_indices_have_no_entries() -> None:
    for value in (tnlib.tt_svd(oracles.normal((3, 4))).value, tnlib.CP([1.0], [np.ones((3, 1)), np.ones((4, 1))])):
        assert tnlib.entries(value, np.empty((0, 2), int)).shape == (0,)


def test_a_fit_is_not_its_value() -> None:
    with oracles.refused(TypeError, "entries: t must be a format, got a Fit", "pass fit.value"):
        tnlib.entries(tnlib.svd(np.eye(2)), [0, 0])  # type: ignore[arg-type]
