"""tt_cross: trains found from their entries, isolated features, bad functions refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracles
import pytest
from cross_functions import Counted, Function, of, of_train, place, sampled_error, solve
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import mostly_slow

import tnlib

# ------------------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("rtol", [1e-2, 1e-6, 1e-10])
@pytest.mark.parametrize("shape", [(20, 20, 20, 20), (30, 30), (7, 5, 6, 4, 5), (4,) * 8], ids=str)
def test_hilbert_tensors(shape: tuple[int, ...], rtol: float) -> None:
    x = oracles.hilbert(shape)
    fit, counted = solve(of(x), shape, rtol)
    assert fit.converged
    assert oracles.true_error(x, fit.value) <= 10 * rtol  # a few entries near the pole may hold nearly all of it
    ranks = tnlib.tt_svd(x, rtol=rtol / 10).value.ranks
    assert all(r <= s for r, s in zip(fit.value.ranks, ranks, strict=True))
    assert fit.n_calls == counted.n
    assert counted.n < x.size or fit.certified


@pytest.mark.parametrize(
    ("f", "shape", "rtol", "rank", "calls"),
    [
        pytest.param(
            *(lambda points: np.sin(20 * place(points) + 0.3), (2,) * 100, 1e-10, 2, 5000),
            id="sine over a hundred binary digits",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda points: np.prod(1.0 / (1.0 + points), axis=1), (10,) * 12, 1e-12, 1, 4000, id="product"),
    ],
)
def test_exact_ranks(f: Function, shape: tuple[int, ...], rtol: float, rank: int, calls: int) -> None:
    fit, counted = solve(f, shape, rtol)
    assert fit.converged
    assert max(fit.value.ranks) == rank
    assert sampled_error(f, fit.value) < rtol
    assert counted.n < calls


BULK = {
    "a pole": lambda points: 1 / (1 + points.mean(axis=1)),
    "a sine": lambda points: np.sin(points.sum(axis=1) / 10.0),
    "a logarithm": lambda points: np.log(1.0 + points.sum(axis=1)),
    "a steep power": lambda points: (1 + points.mean(axis=1)) ** -8.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("rtol", [1e-6, 1e-10])
@pytest.mark.parametrize("kind", BULK)
def test_norms_that_the_peak_has_no_part_in(kind: str, rtol: float) -> None:
    """The largest entry lies in a corner; what counts is a narrow range of the sum that nearly all indices share."""
    calls = []
    for d in (25, 50):
        fit, counted = solve(BULK[kind], (4,) * d, rtol)
        assert fit.converged
        assert sampled_error(BULK[kind], fit.value, 5000) <= 2 * rtol
        assert max(fit.value.ranks) <= 12
        calls.append(counted.n)
    assert calls[1] <= 5 * calls[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,) * 100, tuple(2 + 7 * k % 31 for k in range(200))], ids=["4^100", "2 to 32"])
def test_hundreds_of_legs(shape: tuple[int, ...]) -> None:
    def f(points: np.ndarray) -> np.ndarray:
        return 1 / (1 + points.sum(axis=1) / len(shape))

    fit, counted = solve(f, shape, 1e-6)
    assert fit.converged
    assert sampled_error(f, fit.value, 2000) <= 1e-6
    rank = max(fit.value.ranks) + 4  # two rounds of it: what the cross held before it was rounded
    assert counted.n <= 3 * rank**2 * sum(shape)


@pytest.mark.slow
def test_more_entries_than_the_largest_double() -> None:
    """16^257 is no double: sizes are compared as integers."""
    fit = tnlib.tt_cross(lambda points: np.exp(-1e-3 * points.sum(axis=1)), (16,) * 257, rtol=1e-3)
    assert fit.converged
    np.testing.assert_allclose(fit.value[(1,) * 257], np.exp(-0.257), rtol=2e-3)


@pytest.mark.slow
def test_peaks_on_a_grid_of_a_billion_points() -> None:
    def f(points: np.ndarray) -> np.ndarray:
        x = place(points)
        return np.exp(-(((x - 0.3) / 1e-2) ** 2)) + 2 * np.exp(-(((x - 0.71) / 3e-2) ** 2))

    fit, counted = solve(f, (2,) * 30, 1e-8)
    assert fit.converged
    assert sampled_error(f, fit.value) < 1e-8
    assert counted.n < 20_000
    integral = of_train([np.asarray(core).sum(axis=1, keepdims=True) for core in fit.value.cores])(
        np.zeros((1, 30), int)
    )
    integral = integral[0] * math.exp(fit.value.log_scale) / 2**30
    assert integral == pytest.approx(0.07 * math.sqrt(math.pi), rel=1e-7)


def test_two_places_that_share_nothing() -> None:
    """A peak that is no combination of rows and columns through the other one is found by its error."""

    def f(points: np.ndarray) -> np.ndarray:
        x = points / 15
        return np.exp(-3 * (x**2).sum(axis=1)) + np.exp(-30 * ((x - 1) ** 2).sum(axis=1))

    fit, _ = solve(f, (16,) * 6, 1e-6)
    assert fit.value.ranks == (1, 2, 2, 2, 2, 2, 1)
    assert sampled_error(f, fit.value) < 1e-6


@oracles.each_dtype
@pytest.mark.parametrize(("shape", "rank"), [((8,) * 6, 5), ((2,) * 12, 6), ((5, 1, 6, 7), 3)], ids=str)
def test_a_train_is_found_again(shape: tuple[int, ...], rank: int, dtype: np.dtype) -> None:
    sizes = [math.prod(shape[:k]) for k in range(len(shape) + 1)]
    ranks = [min(rank, size, sizes[-1] // size) for size in sizes]
    wider = np.complex128 if dtype.kind == "c" else np.float64
    cores = [c / math.sqrt(c.shape[0] * c.shape[1]) for c in oracles.random_cores(shape, ranks, wider)]
    exact = of_train([core.astype(wider) for core in cores])
    rtol = 1e-4 if dtype.itemsize // (2 if dtype.kind == "c" else 1) == 4 else 1e-9
    fit, counted = solve(lambda points: exact(points).astype(dtype), shape, rtol)
    assert fit.converged
    assert fit.value.dtype == dtype
    assert sampled_error(exact, fit.value) <= rtol
    assert fit.value.ranks == tuple(ranks)
    stored = sum(a * n * b for a, n, b in zip(ranks[:-1], shape, ranks[1:], strict=True))
    assert counted.n < 2 * stored + 4000


@given(st.integers(0, 10_000), st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_small_trains_of_any_shape(seed: int, shape: list[int], rank: int) -> None:
    ranks = [1, *[rank] * (len(shape) - 1), 1]
    x = oracles.random_train(shape, ranks, seed=seed)
    fit, counted = solve(of(x), shape, 1e-8, rng=seed)
    assert fit.converged
    assert oracles.true_error(x, fit.value) <= 1e-8
    assert counted.n <= x.size
    assert all(r <= s for r, s in zip(fit.value.ranks, oracles.train_ranks(x), strict=True))


# ----------------------------------------------------------------------------------------------------- simple functions


@pytest.mark.parametrize("shape", [(7,), (1,), (1, 1, 1), (3, 4), (1, 5, 1, 4, 1), (2,) * 12], ids=str)
@pytest.mark.parametrize("value", [0.0, 3.5, -2.0, 1j], ids=str)
def test_constants(shape: tuple[int, ...], value: complex) -> None:
    fit, counted = solve(lambda points: np.full(len(points), value), shape, 1e-10)
    assert fit.converged
    assert max(fit.value.ranks) == 1
    np.testing.assert_allclose(fit.value.full(), np.full(shape, value), rtol=1e-12)
    assert bool(fit.notes) == (value == 0)
    assert counted.n <= math.prod(shape)


@pytest.mark.parametrize("scale", [2.0**-660, 2.0**-100, -1.0, 2.0**100, 2.0**660])  # 1e-200 to 1e200, exact
def test_scale(scale: float) -> None:
    x = oracles.hilbert((9, 8, 7, 6))
    plain, counted = solve(of(x), x.shape, 1e-8)
    fit, again = solve(of(x * scale), x.shape, 1e-8)
    assert fit.converged
    assert fit.value.ranks == plain.value.ranks
    assert counted.seen == again.seen
    assert oracles.true_error(x * scale, fit.value) <= 1e-8


def test_a_function_whose_scale_shows_late() -> None:
    """A Gaussian on a grid of spins: nearly all entries are far below the few that count."""

    def f(points: np.ndarray) -> np.ndarray:
        return np.exp(-10.0 * ((points - 3) ** 2).sum(axis=1))

    fit, _ = solve(f, (8,) * 10, 1e-8)
    assert fit.converged
    norm = (np.exp(-20.0 * (np.arange(8) - 3.0) ** 2).sum()) ** 5
    assert fit.value.norm() == pytest.approx(norm, rel=1e-8)


def test_integers_and_lists_are_numbers() -> None:
    fit, _ = solve(lambda points: points.sum(axis=1), (6, 5, 4), 1e-10)
    assert fit.value.dtype == np.float64
    assert max(fit.value.ranks) == 2
    listed, _ = solve(lambda points: points.sum(axis=1).tolist(), (6, 5, 4), 1e-10)
    oracles.assert_same_bits(fit.value, listed.value)


def test_values_may_become_complex_late() -> None:
    x = oracles.hilbert((8, 8, 8, 9)).astype(complex)  # more entries than are evaluated at once
    x[5:] *= 1j
    seen: list[np.dtype] = []

    def f(points: np.ndarray) -> np.ndarray:
        values = x[tuple(points.T)]
        values = values.real if (points[:, 0] < 5).all() else values
        seen.append(values.dtype)
        return values

    fit, _ = solve(f, x.shape, 1e-8)
    assert fit.value.dtype == np.complex128
    assert oracles.true_error(x, fit.value) <= 1e-8
    assert set(seen) == {np.dtype(float), np.dtype(complex)}


# --------------------------------------------------------------------------------------------------- isolated features


def deltas(shape: Sequence[int], count: int, seed: int) -> Function:
    """One at `count` random indices, zero elsewhere."""
    places = np.random.default_rng(seed).choice(math.prod(shape), count, replace=False)
    return lambda points: np.isin(np.ravel_multi_index(tuple(points.T), shape), places).astype(float)


def ghz(points: np.ndarray) -> np.ndarray:
    return (points == points[:, :1]).all(axis=1).astype(float)


def sum_is(total: int) -> Function:
    return lambda points: (points.sum(axis=1) == total).astype(float)


def dense(f: Function, shape: Sequence[int]) -> np.ndarray:
    return f(np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=1)).reshape(shape)


@pytest.mark.parametrize("seed", mostly_slow(range(5), range(2)))
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("delta", (30,) * 3), ("deltas", (30,) * 3), ("ghz", (8,) * 4), ("ghz", (30,) * 3), ("sum", (12,) * 4)],
    ids=str,
)
def test_isolated_features_of_tensors_within_the_budget(kind: str, shape: tuple[int, ...], seed: int) -> None:
    """All entries are evaluated, and the error is certified."""
    f = {"delta": deltas(shape, 1, seed), "deltas": deltas(shape, 20, seed), "ghz": ghz, "sum": sum_is(20)}[kind]
    fit, counted = solve(f, shape, 1e-6, rng=seed)
    assert fit.converged
    assert fit.certified
    assert counted.n == math.prod(shape)
    assert oracles.true_error(dense(f, shape), fit.value) <= 1e-6


@pytest.mark.parametrize("seed", mostly_slow(range(3), range(1)))
@pytest.mark.parametrize("kind", mostly_slow(["delta", "deltas", "ghz", "sum"], ["delta", "deltas", "ghz"]))
def test_isolated_features_beyond_the_budget(kind: str, seed: int) -> None:
    """The train is right, or does not count as converged, or what it misses is smaller than the notes allow."""
    shape = (12,) * 4
    f = {"delta": deltas(shape, 1, seed), "deltas": deltas(shape, 5, seed), "ghz": ghz, "sum": sum_is(20)}[kind]
    fit, counted = solve(f, shape, 1e-6, rng=seed, max_calls=20_000)
    assert counted.n <= 20_000
    x = dense(f, shape)
    missed = np.abs(x - fit.value.full()) > 1e-6
    found = re.match(r"features on fewer than (.*) % of the entries .* by ([\d,]+) uniform indices", fit.notes[-1])
    assert found is not None
    percent, count = float(found[1]), int(found[2].replace(",", ""))
    assert percent == pytest.approx(100 * (1 - 0.01 ** (1 / count)), rel=0.05)
    assert not fit.converged or missed.mean() <= percent / 100
    assert kind != "sum" or (not fit.converged or not missed.any())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_disc_on_two_legs_of_eight_binary_digits(seed: int) -> None:
    """A boundary that few pivots resolve: all entries are evaluated once a third of them is known."""
    digits = 0.5 ** np.arange(1, 9)

    def disc(points: np.ndarray) -> np.ndarray:
        x, y = points[:, ::2] @ digits, points[:, 1::2] @ digits
        return ((x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.16).astype(float)

    fit, counted = solve(disc, (2,) * 16, 1e-3, rng=seed)
    assert fit.certified
    assert counted.n == 1 << 16
    assert oracles.true_error(dense(disc, (2,) * 16), fit.value) <= 1e-3


@pytest.mark.parametrize("seeds", [pytest.param(range(12), marks=pytest.mark.slow), [0]], ids=["12 seeds", "seed 0"])
def test_a_narrow_peak_on_a_background(seeds: Sequence[int]) -> None:
    """A part of 1e-3 of the entries is above the background by more than rtol: 2,048 points miss it in 13 %."""

    def peak(points: np.ndarray) -> np.ndarray:
        return 1e-3 + np.exp(-(((place(points) - 0.3) / 1e-4) ** 2) / 2)

    inside = (0.3 + 1e-4 * np.random.default_rng(0).standard_normal(1000)) * 2**30
    points = inside.astype(np.int64)[:, None] >> np.arange(29, -1, -1) & 1
    fits = [solve(peak, (2,) * 30, 1e-6, rng=seed)[0] for seed in seeds]
    assert all(fit.converged for fit in fits)
    missed = [np.abs(tnlib.entries(fit.value, points) - peak(points)).max() > 1e-5 for fit in fits]
    assert sum(missed) <= len(fits) // 6


def origin(points: np.ndarray) -> np.ndarray:
    return (points.sum(axis=1) == 0).astype(float)


def test_a_function_that_is_zero_wherever_it_was_evaluated_has_not_converged() -> None:
    with pytest.warns(tnlib.ConvergenceWarning, match=r"f is zero at all of the [\d,]+ points .*; pass pivots"):
        fit = tnlib.tt_cross(origin, (2,) * 40, rtol=1e-6, max_calls=10_000)
    assert not fit.converged
    assert fit.value.norm() == 0


@pytest.mark.parametrize("pivots", [[[0] * 40], np.zeros((1, 40), np.uint8), [[1] * 40, [0] * 40]])
def test_known_pivots_find_what_no_sample_meets(pivots: Any) -> None:
    fit = tnlib.tt_cross(origin, (2,) * 40, rtol=1e-6, max_calls=100_000, pivots=pivots)
    assert fit.converged
    assert fit.value.norm() == pytest.approx(1)
    assert tnlib.entries(fit.value, np.zeros((1, 40), int)) == pytest.approx([1])


def test_known_boxes_are_all_found() -> None:
    """One at 20 corners of a grid, and on the neighbours of each along every leg: on 4e-4 of the entries."""
    corners = np.random.default_rng(0).integers(0, 6, (20, 6)) * 2

    def boxes(points: np.ndarray) -> np.ndarray:
        offsets = points[:, None, :] - corners
        return ((offsets >= 0) & (offsets < 2)).all(axis=2).any(axis=1).astype(float)

    fit = tnlib.tt_cross(boxes, (12,) * 6, rtol=1e-6, pivots=corners)
    assert fit.converged
    assert tnlib.entries(fit.value, corners) == pytest.approx(np.ones(20), abs=1e-5)


@pytest.mark.parametrize(
    ("pivots", "words"),
    [
        ([0, 1], "pivots must be integers (m, 3)"),
        ([[0, 1]], "of shape (1, 2)"),
        ([[0.0, 1.0, 2.0]], "got float64"),
        ([[0, 1, 9]], "got 9 for leg 2 of size 4"),
        ([[0, -1, 0]], "got -1 for leg 1"),
        ([], "pivots must be integers"),
    ],
)
def test_other_pivots_are_refused(pivots: Any, words: str) -> None:
    with oracles.refused(tnlib.ArgumentError, "tt_cross", words):
        tnlib.tt_cross(origin, (4,) * 3, rtol=1e-6, pivots=pivots)


@pytest.mark.slow
def test_no_error_that_its_own_points_show() -> None:
    """Where the last test found an error and cannot be repeated, that error is reported."""
    for seed in range(3):
        fit, _ = solve(deltas((16,) * 5, 1000, seed), (16,) * 5, 1e-6, max_calls=20_000, rng=seed)
        assert fit.value.norm() > 0
        assert not fit.converged
        assert fit.error > 0.1


@pytest.mark.slow
def test_smooth_functions_need_no_more_than_a_share_of_their_calls_for_the_last_test() -> None:
    """A function that is zero at most indices is no exception where its support is connected."""
    edge = int(0.35 * 2**30) + np.arange(-1000, 1000)
    points = edge[:, None] >> np.arange(29, -1, -1) & 1
    for f, calls in (
        (lambda p: np.exp(-((place(p) - 0.3) ** 2) / 1e-4), 6000),
        (lambda p: 1.0 * (np.abs(place(p) - 0.3) < 0.05), 12_000),  # its edges take half of them
    ):
        fit, counted = solve(f, (2,) * 30, 1e-6)
        assert counted.n < calls
        np.testing.assert_allclose(tnlib.entries(fit.value, points), f(points), atol=1e-5)


def test_long_legs_are_refused_before_they_take_memory() -> None:
    with oracles.refused(ValueError, "tt_cross", "shape", "2,000,000,000", "max_calls"):
        tnlib.tt_cross(ones, (10**9, 10**9), rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_function_may_spoil_its_argument_and_return_one_array_again_and_again() -> None:
    x = oracles.hilbert((6, 5, 4))
    held = np.empty(100_000)

    def f(points: np.ndarray) -> np.ndarray:
        assert points.dtype == np.int64
        held[: len(points)] = x[tuple(points.T)]
        points[:] = -1
        return held[: len(points)]

    fit, _ = oracles.quietly(lambda: tnlib.tt_cross(f, x.shape, rtol=1e-8))
    assert oracles.true_error(x, fit.value) <= 1e-8


BAD = {
    "a column": (lambda p: np.ones((len(p), 1)), ValueError, "(n_points,)"),
    "a number": (lambda p: 1.0, ValueError, "(n_points,)"),
    "too few": (lambda p: np.ones(len(p) - 1), ValueError, "one value for each"),
    "None": (lambda p: None, ValueError, "(n_points,)"),
    "rows of their own lengths": (lambda p: [[1.0], [1.0, 2.0]], TypeError, "the return value of f"),
    "NaN": (lambda p: np.where(p.sum(axis=1) == 5, np.nan, 1.0), ValueError, "must be finite"),
    "inf": (lambda p: 1.0 / p.sum(axis=1).clip(0) if (p.sum(axis=1) > 0).all() else p[:, 0] * np.inf, ValueError, "f"),
    "words": (lambda p: np.array(["x"] * len(p)), TypeError, "<U1"),
    "objects": (lambda p: np.array([None] * len(p)), TypeError, "dtype object"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_function_that_returns_something_else(kind: str) -> None:
    f, error, words = BAD[kind]
    with oracles.refused(error, "tt_cross", "f", words):
        tnlib.tt_cross(f, (4, 4, 4), rtol=1e-6)


def test_the_first_bad_index_is_named() -> None:
    def f(points: np.ndarray) -> np.ndarray:
        return np.where((points == (2, 3)).all(axis=1), np.inf, 1.0)

    with oracles.refused(ValueError, "(2, 3)", "inf"):
        tnlib.tt_cross(f, (4, 4), rtol=1e-6)


def test_what_a_function_raises_passes_through() -> None:
    def f(points: np.ndarray) -> np.ndarray:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tnlib.tt_cross(f, (4, 4), rtol=1e-6)


def ones(points: np.ndarray) -> np.ndarray:
    return np.ones(len(points))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tnlib.tt_cross(np.ones((3, 3)), (3, 3), rtol=1e-6), TypeError, ["f", "ndarray", "tnlib.tt_svd"]),
        (lambda: tnlib.tt_cross(ones, 5, rtol=1e-6), TypeError, ["shape"]),
        (lambda: tnlib.tt_cross(ones, (), rtol=1e-6), ValueError, ["shape"]),
        (lambda: tnlib.tt_cross(ones, (3, 0), rtol=1e-6), ValueError, ["shape"]),
        (lambda: tnlib.tt_cross(ones, (3, 2.5), rtol=1e-6), TypeError, ["shape"]),
        (lambda: tnlib.tt_cross(ones, (3, 3), rtol=None), TypeError, ["rtol", "None"]),
        (lambda: tnlib.tt_cross(ones, (3, 3), rtol=-1e-6), ValueError, ["rtol"]),
        (lambda: tnlib.tt_cross(ones, (3, 3), rtol=math.nan), ValueError, ["rtol"]),
        (lambda: tnlib.tt_cross(ones, (3, 3), rtol=1e-6, max_calls=0), ValueError, ["max_calls"]),
        (lambda: tnlib.tt_cross(ones, (3, 3), rtol=1e-6, max_calls=1e6), TypeError, ["max_calls"]),
        (lambda: tnlib.tt_cross(ones, (3, 3), rtol=1e-6, rng="0"), TypeError, ["rng"]),
    ],
)
def test_arguments(call: Callable[[], object], error: type[Exception], words: list[str]) -> None:
    with oracles.refused(error, "tt_cross", *words):
        call()


# ------------------------------------------------------------------------------------------------------------- a peer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "shape", "rtol", "ours"),
    [
        (lambda points: 1 / (1.0 + points.sum(axis=1)), (20,) * 5, 1e-6, 2e-7),
        (lambda points: np.exp(-(((place(points) - 0.3) / 1e-2) ** 2)), (2,) * 20, 1e-6, 2e-8),
    ],
    ids=["pole", "peak"],
)
def test_no_more_points_than_teneva_at_its_error(f: Function, shape: tuple[int, ...], rtol: float, ours: float) -> None:
    teneva = pytest.importorskip("teneva")
    theirs = Counted(f)
    start = teneva.rand(list(shape), 1, seed=0)
    cores = teneva.cross(lambda points: theirs(np.asarray(points)), start, e=rtol, m=200_000, cache={})
    cores = teneva.truncate(cores, rtol / 10)
    fit, counted = solve(f, shape, ours)
    assert sampled_error(f, fit.value) <= sampled_error(f, tnlib.TensorTrain(cores))
    assert counted.n <= len(theirs.seen)


def test_an_error_of_f_at_its_first_call_says_what_f_is_given() -> None:
    """A function of one point fails with its own error, and a note names the shape of the indices."""
    with pytest.raises(TypeError) as raised:
        tnlib.tt_cross(lambda point: float(point), (4,) * 20, rtol=1e-3)
    assert any("(512, 20)" in note and "must return (n_points,) numbers" in note for note in raised.value.__notes__)
    calls = iter([1])

    def fails_later(points: np.ndarray) -> np.ndarray:
        if next(calls, None) is None:
            raise ValueError("later")
        return np.ones(len(points))

    with pytest.raises(ValueError, match="later") as later:
        tnlib.tt_cross(fails_later, (4,) * 20, rtol=1e-3)
    assert not hasattr(later.value, "__notes__")
