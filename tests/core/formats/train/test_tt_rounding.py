"""round: tolerance, honest errors, the ranks and the gauge of a decomposition from scratch, at any scale and length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounding_cases import SHAPES, TOLERANCES, as_matrix, check, exact_train, geometric, padded, plus, regauged
from slow_cases import mostly_slow

import tnlib


@oracles.each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trains_keep_the_contract(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    for x in (oracles.normal(shape, dtype), geometric(shape, 0.1, dtype)):
        for rtol in TOLERANCES:
            for cap in (None, 2):
                check(padded(regauged(exact_train(x))), rtol, cap)


@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) > 1], ids=str)
@pytest.mark.parametrize("ratio", mostly_slow([0.5, 0.1, 0.01], [0.1]))
@pytest.mark.parametrize("rtol", [1e-12, 3e-9, 1e-6, 3e-4, 0.03, 0.4, None])
def test_ranks_are_those_of_a_decomposition_from_scratch(
    shape: tuple[int, ...], ratio: float, rtol: float | None
) -> None:
    x = geometric(shape, ratio)
    want = tnlib.tt_svd(x, rtol=rtol)
    for t in (exact_train(x), padded(regauged(exact_train(x))), plus(exact_train(x), exact_train(x))):
        fit = check(t, rtol)
        assert fit.value.ranks == want.value.ranks
        assert fit.error == pytest.approx(want.error, rel=0.05, abs=1e-13)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(4, 5, 6, 4), (3,) * 6, (5, 1, 6)], ids=str)
def test_trains_of_one_tensor_become_the_same(dtype: type, shape: tuple[int, ...]) -> None:
    """Left singular vectors with fixed phases on every bond: nothing of the gauge of the input is left."""
    x = geometric(shape, 0.4, dtype)
    t = exact_train(x)
    zero = tnlib.TensorTrain([0 * core for core in t.cores])
    others = [regauged(t), padded(t), plus(t, zero), plus(zero, t), plus(plus(t, t), t, -1.0)]
    others.append(tnlib.TensorTrain([c * (2.0 if k else 0.5 ** (len(shape) - 1)) for k, c in enumerate(t.cores)]))
    others.append(tnlib.TensorTrain([core / np.e for core in t.cores], log_scale=float(len(shape))))
    want = tnlib.round(t, rtol=1e-9).value
    for other in others:
        got = tnlib.round(other, rtol=1e-9).value
        assert got.ranks == want.ranks
        assert got.log_scale == want.log_scale == 0
        for one, two in zip(got.cores, want.cores, strict=True):
            oracles.assert_close(one, two, factor=1e5)
    decomposed = tnlib.tt_svd(x, rtol=1e-9).value
    for one, two in zip(decomposed.cores, want.cores, strict=True):
        oracles.assert_close(one, two, factor=1e5)


@oracles.each_dtype
@pytest.mark.parametrize("rtol", [None, 1e-4])
def test_rounding_twice_is_rounding_once(dtype: np.dtype, rtol: float | None) -> None:
    for shape in SHAPES:
        once = tnlib.round(exact_train(geometric(shape, 0.3, dtype)), rtol=rtol)
        twice = tnlib.round(once.value, rtol=rtol if rtol is None else rtol / 100)
        assert twice.value.ranks == once.value.ranks
        assert twice.error <= 100 * oracles.eps(dtype)
        for one, two in zip(once.value.cores, twice.value.cores, strict=True):
            oracles.assert_close(two, one, dtype, factor=2e4)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    rank=st.integers(1, 9),
    dtype=st.sampled_from(oracles.DTYPES),
    seed=st.integers(0, 99),
    rtol=st.sampled_from(TOLERANCES),
    cap=st.sampled_from([None, 1, 2, 4]),
    kind=st.sampled_from(["normal", "zero", "one zero core", "repeated", "integers", "tiny bond"]),
    matrix=st.booleans(),
)
def test_any_train(shape, rank, dtype, seed, rtol, cap, kind, matrix) -> None:
    cores = oracles.random_cores(shape, [1, *[rank] * (len(shape) - 1), 1], dtype, seed)
    if kind == "zero":
        cores = [0 * core for core in cores]
    if kind == "one zero core":
        cores[seed % len(cores)][...] = 0
    if kind == "repeated":
        cores = [np.repeat(core[:1], core.shape[0], axis=0) for core in cores]
    if kind == "integers":
        cores = [np.round(core) for core in cores]
    if kind == "tiny bond":
        cores[-1] = cores[-1] * dtype.type(1e-7)
        cores[0][..., -1:] *= dtype.type(1e-6)
    t = tnlib.TensorTrain(cores)
    check(as_matrix(t) if matrix else t, rtol, cap)


@oracles.each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zero_trains(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    t = tnlib.TensorTrain(
        [0 * core for core in padded(exact_train(oracles.normal(shape, dtype))).cores], log_scale=-3.5
    )
    for kwargs in ({}, {"rtol": 0.1}, {"rtol": 0.0}, {"max_rank": 2}):
        for value in (t, as_matrix(t)):
            fit = tnlib.round(value, **kwargs)
            assert fit.value.ranks == (1,) * (len(shape) + 1)
            assert fit.error == 0
            assert fit.converged
            assert not fit.value.full().any()
            assert fit.value.log_norm() == -math.inf


def test_a_difference_that_cancels_is_zero_or_roundoff() -> None:
    t = exact_train(oracles.normal((4, 5, 6)))
    fit = tnlib.round(plus(t, t, -1.0), rtol=1e-6)
    assert fit.value.norm() <= 1e-14 * t.norm()


@oracles.each_dtype
def test_a_single_core_keeps_its_numbers(dtype: np.dtype) -> None:
    t = tnlib.TensorTrain([oracles.normal((1, 5, 1), dtype)])
    for kwargs in ({}, {"rtol": 0.5}, {"max_rank": 1}):
        fit = tnlib.round(t, **kwargs)
        assert fit.error == 0
        assert fit.value.center == 0
        np.testing.assert_array_equal(fit.value.full(), t.full())
        assert not np.shares_memory(fit.value.cores[0], t.cores[0])


def test_a_result_does_not_follow_later_changes_of_its_input() -> None:
    cores = oracles.random_cores((3, 4, 5), (1, 2, 2, 1))
    for t in (
        tnlib.TensorTrain(cores),
        tnlib.LowRank(cores[0][0], cores[1][:, 0]),
        tnlib.Tucker(cores[1][..., 0], [cores[0][0], cores[2][..., 0].T.copy() @ np.ones((2, 4))]),
        tnlib.SVD(oracles.isometry(4, 2), np.array([2.0, 1.0]), oracles.isometry(5, 2).T.copy()),
    ):
        arrays = [a.base if a.base is not None else a for a in t.arrays()]
        value = tnlib.round(t).value
        before = value.full().copy()
        for a in arrays:
            if a.flags.writeable:
                a[...] = 7
        np.testing.assert_array_equal(value.full(), before)


@oracles.each_dtype
def test_the_same_train_gives_the_same_bits(dtype: np.dtype) -> None:
    t = tnlib.TensorTrain(oracles.random_cores((6, 7, 8, 5), (1, 9, 9, 9, 1), dtype))
    want = tnlib.round(t, rtol=0.1)
    for layout in oracles.LAYOUTS.values():
        got = tnlib.round(tnlib.TensorTrain([layout(core) for core in t.cores]), rtol=0.1)
        oracles.assert_same_bits(got.value, want.value)
        assert got.error == want.error


@oracles.each_dtype
@pytest.mark.parametrize("log_scale", [-1e6, -1000.0, -80.0, -0.3, 0.3, 80.0, 1000.0, 1e6])
def test_any_log_scale(dtype: np.dtype, log_scale: float) -> None:
    x = geometric((4, 5, 6), 0.1, dtype)
    t = regauged(exact_train(x))
    want = tnlib.round(t, rtol=0.03)
    fit = tnlib.round(tnlib.TensorTrain(t.cores, log_scale=log_scale), rtol=0.03)
    oracles.assert_gauge(fit.value)
    assert fit.value.ranks == want.value.ranks
    assert fit.error == pytest.approx(want.error, rel=1e-3)
    assert fit.value.log_norm() == pytest.approx(want.value.log_norm() + log_scale, abs=2e-5, rel=1e-9)
    assert all(np.isfinite(core).all() for core in fit.value.cores)
    for one, two in zip(fit.value.cores[:-1], want.value.cores[:-1], strict=True):
        oracles.assert_close(one, two, dtype, factor=1000)


def narrow_train(dtype: np.dtype) -> Sequence[np.ndarray]:
    """Sixty entries wide and sixteen deep, so that bases of rows come from Gram matrices."""
    return regauged(exact_train(geometric((16,) * 4, 0.02, dtype)[..., 0])).cores


def wide_train(dtype: np.dtype) -> Sequence[np.ndarray]:
    """Decay on every bond down to roundoff: what is faint must not vanish in a square."""
    cores = oracles.random_cores((32,) * 5, (1, 24, 24, 24, 24, 1), dtype)
    return [core * np.geomspace(1, 1e-6, 24)[: core.shape[2]].astype(dtype) for core in cores]


# powers of ten that one core may be multiplied by; many of them in a row leave the range of the dtype by far
SIZES = [(narrow_train, [-30, -20, -12, -9, -4, 4, 9, 12, 20, 30]), (wide_train, [-18, -9, 9, 18])]


@oracles.each_dtype
@pytest.mark.parametrize(("make", "powers"), SIZES)
def test_cores_of_any_size(make: Callable[..., Sequence[np.ndarray]], powers: list[int], dtype: np.dtype) -> None:
    cores = make(dtype)
    want = tnlib.round(tnlib.TensorTrain([core.astype(np.complex128) for core in cores]), rtol=1e-2)
    for power in powers:
        fit = tnlib.round(tnlib.TensorTrain([core * dtype.type(10.0**power) for core in cores]), rtol=1e-2)
        oracles.assert_gauge(fit.value)
        assert fit.value.ranks == want.value.ranks
        assert fit.error == pytest.approx(want.error, rel=0.01)
        shift = len(cores) * power * math.log(10)
        assert fit.value.log_norm() == pytest.approx(want.value.log_norm() + shift, abs=1e-4)


def canonical(t: tnlib.TensorTrain) -> tuple[list[np.ndarray], float]:
    """Left-isometric cores in double precision, the last one of norm 1, and the logarithm of the norm of `t`."""
    cores, total, carry = [], t.log_scale, np.ones((1, 1))
    for core in t.cores:
        grown = np.tensordot(carry, oracles.wide(core), 1)
        size = np.abs(grown).max()
        q, carry = np.linalg.qr((grown / size).reshape(-1, core.shape[2]))
        cores.append(q.reshape(len(grown), core.shape[1], -1))
        total += math.log(size)
    return [*cores[:-1], cores[-1] * carry / np.abs(carry)], total + math.log(np.abs(carry).item())


def distance(a: tnlib.TensorTrain, b: tnlib.TensorTrain) -> float:
    """norm(a - b) / norm(a), from triangles: no square, so no floor at the root of eps."""
    (one, size), (other, other_size) = canonical(a), canonical(b)
    other[-1] = other[-1] * math.exp(other_size - size)
    return math.exp(canonical(plus(tnlib.TensorTrain(one), tnlib.TensorTrain(other), -1.0))[1])


LONG = [(dtype, *train) for dtype in oracles.DTYPES for train in ((60, 1e-3), (60, 1e3), (1000, 1e3))]


@pytest.mark.parametrize(
    ("dtype", "count", "size"),
    mostly_slow(LONG, [case for case in LONG if case[1] == 60]),
    ids=str,
)
def test_long_trains(dtype: np.dtype, count: int, size: float) -> None:
    """Twice the same, and a little of another train: the ranks of the one are left, and the error is known."""
    ranks = [1, *[4] * (count - 1), 1]
    cores = oracles.random_cores((3,) * count, ranks, dtype)
    other = oracles.random_cores((3,) * count, ranks, dtype, seed=count)
    balance = math.exp((canonical(tnlib.TensorTrain(cores))[1] - canonical(tnlib.TensorTrain(other))[1]) / count)
    one, other = ([c * dtype.type(f * size) for c in cs] for cs, f in ((cores, 1.0), (other, balance)))
    other[0] = other[0] * dtype.type(1e-4)  # less than the share of one bond among a thousand
    t = plus(plus(tnlib.TensorTrain(one), tnlib.TensorTrain(one)), tnlib.TensorTrain(other))
    fit = tnlib.round(t, rtol=1e-2)
    oracles.assert_gauge(fit.value)
    assert fit.converged
    assert max(fit.value.ranks) <= 4
    assert math.isfinite(fit.value.log_scale)
    true, unit = distance(t, fit.value), 32 * oracles.eps(dtype) * math.sqrt(count)
    assert true <= fit.error + unit
    assert 2e-5 < true <= 1e-2
    assert fit.error <= 1.05 * true + unit


@oracles.each_dtype
def test_matrices_round_as_their_trains_do(dtype: np.dtype) -> None:
    t = padded(regauged(exact_train(geometric((6, 8, 9, 4), 0.2, dtype))))
    for rtol in (None, 1e-3, 0.1):
        for cap in (None, 2):
            fit = check(as_matrix(t), rtol, cap)
            plain, _ = oracles.quietly(lambda rtol=rtol, cap=cap: tnlib.round(t, rtol=rtol, max_rank=cap))
            assert fit.value.ranks == plain.value.ranks
            assert fit.error == plain.error
            for one, two in zip(fit.value.cores, plain.value.cores, strict=True):
                np.testing.assert_array_equal(one.reshape(two.shape), two)
