"""round_randomized: errors near the best ones, estimates near the true ones, sums that are never formed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import oracles
import pytest
from slow_cases import mostly_slow

import tnlib
from tnlib.formats.train.round_randomized import bond_bounds, project_on_sketch


def spread_spectrum(shape: tuple[int, ...], ratio: float = 0.5, dtype: np.dtype = np.float64) -> np.ndarray:
    """Every unfolding has singular values ratio ** k."""
    count = min(shape)
    legs = [oracles.isometry(n, count, dtype, seed=k) for k, n in enumerate(shape)]
    return oracles.contract(tnlib.CP(ratio ** np.arange(count), legs)).astype(dtype)


def terms_of(shape: tuple[int, ...], rank: int, count: int, dtype: np.dtype = np.float64) -> list[tnlib.TensorTrain]:
    ranks = [1, *[rank] * (len(shape) - 1), 1]
    return [tnlib.TensorTrain(oracles.random_cores(shape, ranks, dtype, seed=50 * k)) for k in range(count)]


def total(terms: list[tnlib.TensorTrain]) -> np.ndarray:
    return np.sum([oracles.contract(term) for term in terms], axis=0)


@pytest.fixture(autouse=True)
def _sketches_of_small_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sketch small trains too, for which rounding is faster."""
    monkeypatch.setattr("tnlib.formats.train.round_randomized.LEAST_SAVING", 0)


@oracles.each_dtype
@pytest.mark.parametrize("rtol", [1e-1, 1e-2, 1e-3])
def test_a_tolerance_is_met(rtol: float, dtype: np.dtype) -> None:
    x = spread_spectrum((9, 8, 8, 9), dtype=dtype)
    t = tnlib.tt_svd(x).value
    with oracles.unchanged(*t.arrays()):
        fit = tnlib.round_randomized(t, rtol=rtol)
    assert fit.converged
    assert not fit.certified
    assert fit.value.dtype == dtype
    assert oracles.true_error(x, fit.value) <= rtol
    assert fit.value.ranks == tnlib.round(t, rtol=rtol).value.ranks
    oracles.assert_gauge(fit.value)


@oracles.each_dtype
@pytest.mark.parametrize("cap", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_cap_costs_little_more_than_the_best_train(cap: int, seed: int, dtype: np.dtype) -> None:
    x = spread_spectrum((20, 18, 18, 20), dtype=dtype)
    t = tnlib.tt_svd(x).value
    fit, best = tnlib.round_randomized(t, max_rank=cap, rng=seed), tnlib.round(t, max_rank=cap)
    assert max(fit.value.ranks) == cap
    true = oracles.true_error(x, fit.value)
    assert best.error * (1 - 1e-3) <= true <= 1.05 * best.error
    assert 0.9 * true <= fit.error <= 1.2 * true


@pytest.mark.parametrize("seed", range(8))
def test_what_a_sketch_leaves_out_is_estimated(seed: int) -> None:
    """A flat spectrum is the worst case: a sketch hardly wider than the cap loses much, and knows how much."""
    x = oracles.normal((12,) * 4, seed=seed)
    t = tnlib.tt_svd(x).value
    fit = tnlib.round_randomized(t, max_rank=12, rng=seed)
    true = oracles.true_error(x, fit.value)
    assert 0.8 * true <= fit.error <= 1.3 * true


@oracles.each_dtype
def test_a_sum_is_that_of_its_terms(dtype: np.dtype) -> None:
    terms = terms_of((5, 4, 3, 4), 2, 7, dtype)
    x = total(terms)
    fit = tnlib.round_randomized(terms, rtol=1e-5)
    assert oracles.true_error(x, fit.value) <= 1e-5
    loose = tnlib.round_randomized(terms, max_rank=3)
    true = oracles.true_error(x, loose.value)
    assert 0.7 * true <= loose.error <= 1.5 * true


@pytest.mark.parametrize("options", [{"rtol": 1e-6}, {"max_rank": 12}, {"rtol": 0.3, "max_rank": 8}])
def test_a_sum_of_unrelated_terms_is_rounded(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    terms = terms_of((5, 6, 6, 5), 4, 4)
    fit, _ = oracles.quietly(lambda: tnlib.round_randomized(terms, **options))
    want, _ = oracles.quietly(lambda: tnlib.round(sum(terms[1:], terms[0]), **options))
    assert fit.certified
    assert (fit.value.ranks, fit.error) == (want.value.ranks, pytest.approx(want.error))
    oracles.assert_close(fit.value.full(), want.value.full(), factor=1e3)


@pytest.mark.parametrize("d", mostly_slow([1_000, 100_000], [1_000]))
def test_bounds_of_ranks_take_time_linear_in_the_number_of_legs(d: int) -> None:
    bounds = bond_bounds([tnlib.ones((2,) * d).cores] * 3)
    assert bounds == [1, 2, *[3] * (d - 3), 2, 1]


def test_bounds_of_ranks_of_a_sum() -> None:
    assert bond_bounds([t.cores for t in terms_of((3, 2, 4, 2), 9, 1)]) == [1, 3, 6, 2, 1]


def test_terms_that_cancel() -> None:
    one = terms_of((6, 5, 5, 6), 4, 1)[0]
    small = tnlib.TensorTrain([core * 1e-2 for core in terms_of((6, 5, 5, 6), 2, 2)[1].cores])
    fit = tnlib.round_randomized([one, small, -1.0 * one], rtol=1e-4)
    assert oracles.true_error(oracles.contract(small), fit.value) <= 1e-4
    assert max(fit.value.ranks) == 2


@pytest.mark.slow
def test_a_thousand_cores_in_ranks_that_could_not_be_rounded_together() -> None:
    """Twenty copies of one train, slightly off: the sum has ranks 320, and no part of it is formed."""
    rng = np.random.default_rng(3)
    base = [rng.standard_normal((16 if k else 1, 2, 16 if k < 199 else 1)) / math.sqrt(32) for k in range(200)]
    terms = [tnlib.TensorTrain([core * (1 + 1e-4 * rng.standard_normal()) for core in base]) for _ in range(20)]
    fit = tnlib.round_randomized(terms, max_rank=16)
    assert fit.error < 1e-10
    want = sum(math.exp(term.log_norm() - terms[0].log_norm()) for term in terms)  # all are multiples of one
    assert math.exp(fit.value.log_norm() - terms[0].log_norm()) == pytest.approx(want, rel=1e-10)


def test_a_log_scale_and_terms_of_different_scales() -> None:
    one, other = terms_of((4, 5, 4), 2, 2)
    big = tnlib.TensorTrain(one.cores, log_scale=800.0)
    far = tnlib.TensorTrain(other.cores, log_scale=790.0)
    fit = tnlib.round_randomized([big, far], rtol=1e-10)
    x = oracles.contract(one) + math.exp(-10.0) * oracles.contract(other)
    held = tnlib.TensorTrain(fit.value.cores, log_scale=fit.value.log_scale - 800.0)
    assert oracles.true_error(x, held) <= 1e-9


@pytest.mark.parametrize("shape", [(5,), (1, 1, 1), (4, 1, 5), (2,) * 8], ids=str)
def test_small_and_zero_trains(shape: tuple[int, ...]) -> None:
    terms = terms_of(shape, 3, 2)
    fit = tnlib.round_randomized(terms, rtol=1e-8)
    assert oracles.true_error(total(terms), fit.value) <= 1e-8
    zero = tnlib.TensorTrain([0 * core for core in terms[0].cores])
    nothing = tnlib.round_randomized([zero, zero], rtol=1e-8, max_rank=2)
    assert nothing.value.norm() == 0
    assert nothing.error == 0
    assert nothing.converged
    same = tnlib.round_randomized([zero, terms[0]], max_rank=4)
    assert oracles.true_error(oracles.contract(terms[0]), same.value) <= 1e-12


def test_matrices_stay_matrices() -> None:
    cores = [oracles.normal((a, 3, 2, b), seed=a) for a, b in ((1, 4), (4, 4), (4, 1))]
    a = tnlib.TTMatrix(cores)
    fit = tnlib.round_randomized([a, a], rtol=1e-10)
    assert isinstance(fit.value, tnlib.TTMatrix)
    oracles.assert_close(fit.value.full(), 2 * a.full(), factor=1e4)


def test_seeds_decide_and_nothing_else() -> None:
    t = tnlib.tt_svd(oracles.normal((9,) * 4)).value
    one, same, other = (tnlib.round_randomized(t, max_rank=4, rng=rng).value for rng in (None, 0, 1))
    oracles.assert_same_bits(one, same)
    assert any((a != b).any() for a, b in zip(one.cores, other.cores, strict=True))


def test_a_cap_that_misses_the_tolerance_says_so() -> None:
    t = tnlib.tt_svd(oracles.normal((9,) * 4)).value
    with pytest.warns(tnlib.ConvergenceWarning, match="round_randomized: the error .* misses rtol=0.001") as caught:
        fit = tnlib.round_randomized(t, rtol=1e-3, max_rank=3)
    assert not fit.converged
    assert caught[0].filename == __file__
    assert len(caught) == 1


T = tnlib.TensorTrain([np.ones((1, 2, 1))] * 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tnlib.round_randomized(T), ValueError, ["rtol or max_rank"]),
        (lambda: tnlib.round_randomized([], rtol=0.1), ValueError, ["at least one"]),
        (lambda: tnlib.round_randomized(np.ones((2, 2)), rtol=0.1), TypeError, ["ndarray"]),
        (lambda: tnlib.round_randomized([T, 3.0], rtol=0.1), TypeError, ["term 1", "float"]),
        (
            lambda: tnlib.round_randomized([T, tnlib.TensorTrain([np.ones((1, 3, 1))] * 2)], rtol=0.1),
            ValueError,
            ["one kind and shape", "3 x 3"],
        ),
        (lambda: tnlib.round_randomized(T, rtol=-1), ValueError, ["rtol"]),
        (lambda: tnlib.round_randomized(T, max_rank=0), ValueError, ["max_rank"]),
    ],
)
def test_arguments(call: Callable[[], object], error: type[Exception], words: list[str]) -> None:
    with oracles.refused(error, "round_randomized", *words):
        call()


@pytest.mark.parametrize("width", [1, 3, 5, 50])
def test_a_sketch_estimates_the_error_of_its_projection(width: int) -> None:
    terms = [oracles.random_cores((6, 5, 5, 6), (1, 4, 5, 4, 1), seed=10 * k) for k in range(2)]
    x = sum(oracles.dense_train(cores) for cores in terms)
    squares, guesses = [], []
    for seed in range(12):
        train, lost = project_on_sketch(terms, width, np.random.default_rng(seed))
        for core in train.cores[:-1]:
            oracles.assert_isometric(core)
        y = oracles.dense_train(train.cores) * 2.0**train.exponent
        assert max(train.ranks) <= min(width, max(bond_bounds(terms)))
        true = np.linalg.norm(x - y)
        assert np.vdot(y, x - y) == pytest.approx(0, abs=1e-10 * np.vdot(x, x))  # a projection
        squares.append(true**2)
        guesses.append((lost * 2.0**train.exponent) ** 2)
    if width == 50:
        assert max(guesses) <= 1e-20 * np.vdot(x, x)
        assert max(squares) <= 1e-20 * np.vdot(x, x)
    else:  # two standard errors above the mean, at least as much as one column alone can tell
        assert 0.5 * np.mean(squares) <= np.mean(guesses) <= 4 * np.mean(squares)
