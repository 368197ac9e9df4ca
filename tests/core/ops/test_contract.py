"""Contraction of legs and entries at many indices, against dense arrays."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import assert_entries, assert_is, dtypes, reach, shapes, train, trains

import tnlib


@given(shapes, st.integers(1, 4), dtypes, st.integers(0, 999), st.data())
def test_vectors_take_legs_away(shape: list[int], rank: int, dtype: Any, seed: int, data: st.DataObject) -> None:
    t = train(shape, rank, dtype, seed, data.draw(st.sampled_from([0.0, -3.0, 30.0])))
    legs = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    scale = data.draw(st.sampled_from([1.0, 1e-80, 1e80]))
    vectors = {k: scale * oracles.normal((shape[k],), np.complex128, seed + k) for k in legs}
    want = oracles.wide(oracles.contract(t))
    size = reach(t) * math.prod(oracles.norm(v) for v in vectors.values())
    ones = want.sum(axis=tuple(legs))
    for k in sorted(legs, reverse=True):
        want = np.tensordot(want, vectors[k], axes=([k], [0]))
    with oracles.unchanged(*t.cores, *vectors.values()):
        assert_is(tnlib.contract(t, vectors), want, dtype, size)
        assert_is(tnlib.sum_legs(t, sorted(legs)), ones, dtype, reach(t) * math.sqrt(math.prod(shape)))


@given(shapes, st.integers(1, 3), st.integers(1, 3), dtypes, st.integers(0, 999), st.data())
def test_trains_take_legs_away(shape: list[int], r: int, s: int, dtype: Any, seed: int, data: st.DataObject) -> None:
    a = train(shape, r, dtype, seed, data.draw(st.sampled_from([0.0, -3.0, 30.0])))
    legs = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    b = train([shape[k] for k in legs], s, np.complex128, seed + 9)
    x, y = (oracles.wide(oracles.contract(t)) for t in (a, b))
    assert_is(tnlib.contract(a, b, legs), np.tensordot(x, y, axes=(legs, range(len(legs)))), dtype, reach(a) * reach(b))
    wide = [n if k in legs else data.draw(st.integers(1, 3)) for k, n in enumerate(shape)]
    c = train(wide, s, dtype, seed + 18)
    z = oracles.wide(oracles.contract(c))
    want = np.tensordot(x, z, axes=(legs, legs))
    rows = math.prod(shape[k] for k in range(len(shape)) if k not in legs)
    got = tnlib.contract(a, c, legs)
    if len(legs) < len(shape):
        assert isinstance(got, tnlib.TTMatrix)
        want = want.reshape(rows, -1)
    assert_is(got, want, dtype, reach(a) * reach(c))


@oracles.each_dtype
def test_small_formats(dtype: np.dtype) -> None:
    factors = [oracles.normal((n, 2), dtype, n) for n in (3, 4, 5)]
    for value in (
        tnlib.CP(oracles.normal((2,), dtype), factors),
        tnlib.Tucker(oracles.normal((2, 2, 2), dtype), factors),
    ):
        dense, v = oracles.contract(value), oracles.normal((4,), dtype)
        u, w = (oracles.normal((n,), dtype) for n in (3, 5))
        got, one, number = (tnlib.contract(value, own) for own in ({-2: v}, {0: u, 2: w}, {0: u, 1: v, 2: w}))
        assert type(got) is type(value)
        oracles.assert_close(one.full(), np.einsum("ijk,i,k->j", dense, u, w), dtype, 500)
        oracles.assert_close(number, np.einsum("ijk,i,j,k", dense, u, v, w), dtype, 4000)
        oracles.assert_close(tnlib.inner(value, 2 * value), 2 * np.vdot(dense, dense), dtype, 200)
        oracles.assert_close(got.full(), np.einsum("ijk,j->ik", dense, v), dtype, 200)
        oracles.assert_close(tnlib.sum_legs(value, (0, 2)).full(), dense.sum(axis=(0, 2)), dtype, 400)
        oracles.assert_close(tnlib.sum_legs(value), dense.sum(), dtype, 4000)
        oracles.assert_close(tnlib.sum_legs(value, 1).full(), dense.sum(axis=1), dtype, 400)


def ghz(d: int, n: int = 2) -> tnlib.TensorTrain:
    return tnlib.convert(tnlib.CP(np.full(n, n**-0.5), [np.eye(n)] * d), tnlib.TensorTrain)


@pytest.mark.parametrize("n", [2, 8])
def test_reduced_density_matrices_of_200_cores(n: int) -> None:
    """Of a GHZ state all but three legs are summed: n equal weights on the diagonal, wherever the three are."""
    state = ghz(200, n)
    for kept in ((0, 1, 2), (0, 100, 199), (50, 51, 120)):
        legs = [k for k in range(200) if k not in kept]
        rho = tnlib.contract(state, state.conj(), legs)
        assert rho.row_shape == rho.col_shape == (n,) * 3
        assert rho.norm() == pytest.approx(n**-0.5, rel=1e-12)
        points = [[[i, i]] * 3 for i in range(n)]
        np.testing.assert_allclose(tnlib.entries(rho, points), 1 / n, rtol=1e-12)
        assert tnlib.entries(rho, [[0, 1], [0, 1], [0, 1]]) == 0


def test_sums_of_200_cores() -> None:
    for n in (2, 32):
        legs = [np.linspace(1, 2, n) / (1.5 * n) for _ in range(200)]  # each sums to one
        t = tnlib.TensorTrain([leg.reshape(1, -1, 1) for leg in legs])
        assert tnlib.sum_legs(t) == pytest.approx(1, rel=1e-12)
        np.testing.assert_allclose(tnlib.sum_legs(t, [k for k in range(200) if k != 77]).full(), legs[77], rtol=1e-12)
    big = tnlib.TensorTrain([np.ones((1, 2, 1))] * 3, log_scale=1000.0)
    assert tnlib.sum_legs(big, (0, 1)).log_norm() == pytest.approx(1000 + math.log(4) + math.log(2) / 2)
    with oracles.refused(ValueError, "sum_legs: the result", "log_scale"):
        tnlib.sum_legs(big)


T = train((2, 3), 2)
A = tnlib.TTMatrix([np.ones((1, 2, 2, 1))])
REFUSED = [
    (lambda: tnlib.contract(T, {0: np.ones(3)}), ValueError, ["contract: the vector of leg 0", "(2,)", "(3,)"]),
    (lambda: tnlib.contract(T, {2: np.ones(3)}), ValueError, ["contract: legs must lie between -2 and 1", "2"]),
    (lambda: tnlib.contract(T, {1: np.ones(3), -1: np.ones(3)}), ValueError, ["contract: legs must name every leg"]),
    (lambda: tnlib.contract(T, {0: np.ones((2, 1))}), ValueError, ["contract: the vector of leg 0", "(2, 1)"]),
    (lambda: tnlib.contract(T, {0: [1.0, np.nan]}), ValueError, ["contract: the vector of leg 0", "finite"]),
    (lambda: tnlib.contract(T, {0: np.ones(2)}, [0]), TypeError, ["contract: legs must be left out"]),
    (lambda: tnlib.contract(A, {0: np.ones(2)}), TypeError, ["contract: t must", "TTMatrix"]),
    (lambda: tnlib.contract(T, T), TypeError, ["contract: legs must name"]),
    (lambda: tnlib.contract(T, np.ones(2), [0]), TypeError, ["contract: other must be a TensorTrain", "ndarray"]),
    (lambda: tnlib.contract(T, train((3,), 1), [0]), ValueError, ["contract: leg 0 must have one size", "2 and 3"]),
    (lambda: tnlib.contract(T, train((2, 2, 2), 1), [0]), ValueError, ["contract: other must have one leg", "or 2"]),
    (lambda: tnlib.contract(T, T, [1, 0]), ValueError, ["contract: legs", "ascending", "[1, 0]"]),
    (lambda: tnlib.contract(T, T, []), ValueError, ["contract: legs", "at least one"]),
    (lambda: tnlib.sum_legs(T, "0"), TypeError, ["sum_legs: axis must be leg numbers"]),
    (lambda: tnlib.sum_legs(T, np.array(0.0)), TypeError, ["sum_legs: axis must be leg numbers"]),
    (lambda: tnlib.sum_legs(train((2,), 0), 1), ValueError, ["sum_legs: axis must lie", "the tensor has one leg."]),
    (lambda: tnlib.sum_legs(T, 2), ValueError, ["sum_legs: axis must lie", "2 legs"]),
    (lambda: tnlib.sum_legs(A), TypeError, ["sum_legs: t must", "TTMatrix"]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_does_not_fit_is_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "got", *words):
        call()


@pytest.mark.parametrize("value", [T, tnlib.convert(T, tnlib.Tucker)], ids=["train", "Tucker"])
def test_summing_over_no_leg_changes_nothing(value: Any) -> None:
    for out in (tnlib.sum_legs(value, ()), tnlib.contract(value, {})):
        assert type(out) is type(value)
        oracles.assert_close(out.full(), value.full(), factor=100)


def test_axes_in_any_order() -> None:
    t = train((2, 3, 4), 2)
    oracles.assert_close(tnlib.sum_legs(t, (2, 0)).full(), t.full().sum(axis=(2, 0)), factor=200)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_vectors_of_any_scale(dtype: type) -> None:
    c = 1e30 if dtype == np.float32 else 1e200
    factors = [oracles.normal((n, 2), dtype, n) for n in (2, 3, 4)]
    for value in (train((2, 3, 4), 2, dtype), tnlib.CP(np.ones(2, dtype), factors)):
        plain = tnlib.contract(value, {0: np.ones(2, dtype), 2: np.ones(4, dtype)})
        scaled = tnlib.contract(value, {0: np.full(2, c, dtype), 2: np.full(4, 1 / c, dtype)})
        oracles.assert_close(scaled.full(), plain.full(), dtype, 200)
        large = tnlib.contract(value, {0: np.full(2, c, dtype)})
        oracles.assert_close(large.full() / dtype(c), tnlib.sum_legs(value, 0).full(), dtype, 200)
        assert not tnlib.contract(0 * value, {0: np.full(2, c, dtype)}).full().any()


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
    if points.ndim == len(value.shape) + 1:  # one index a leg, which may count from the end
        negative = points.reshape(-1, len(value.shape)) - value.shape
        oracles.assert_close(tnlib.entries(value, negative), want.reshape(-1), value.dtype, 200)


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


@pytest.mark.slow
def test_many_entries_take_bounded_memory() -> None:
    train = tnlib.TensorTrain(oracles.random_cores((4,) * 20, (1, *[64] * 19, 1)))
    points = np.random.default_rng(0).integers(0, 4, (100_000, 20))
    tracemalloc.start()
    tnlib.entries(train, points)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < points.nbytes * 2 + 8 * 64 * len(points)  # less than one row for each point, and two indices


TRAIN = tnlib.TensorTrain([np.ones((1, 2, 3)), np.ones((3, 4, 1))])
TWO_PAIRS = tnlib.TTMatrix([np.ones((1, 2, 2, 1)), np.ones((1, 3, 4, 1))])

REFUSED_INDICES = [
    (lambda: tnlib.entries(TRAIN, [[0, 4]]), ValueError, ["entries: indices of leg 1", "-4 and 3", "got 4", "point 0"]),
    (lambda: tnlib.entries(TRAIN, [[0, 1, 2]]), ValueError, ["entries: indices must have shape (..., 2)", "(1, 3)"]),
    (lambda: tnlib.entries(TRAIN, [[0.0, 1.0]]), TypeError, ["entries: indices must be integers", "float64"]),
    (lambda: tnlib.entries(TRAIN, 0), ValueError, ["entries: indices must have shape (..., 2)", "()"]),
    (
        lambda: tnlib.entries(TWO_PAIRS, [[0, 0]]),
        ValueError,
        ["entries: indices must have shape (..., 2, 2)", "(1, 2)"],
    ),
    (lambda: tnlib.entries(np.ones((2, 2)), [[0, 0]]), TypeError, ["entries: t must", "ndarray"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED_INDICES)
def test_impossible_indices_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, *words):
        call()


def test_no_indices_have_no_entries() -> None:
    for value in (tnlib.tt_svd(oracles.normal((3, 4))).value, tnlib.CP([1.0], [np.ones((3, 1)), np.ones((4, 1))])):
        assert tnlib.entries(value, np.empty((0, 2), int)).shape == (0,)
