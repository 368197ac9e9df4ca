"""tt_cross: errors estimated honestly, budgets of calls kept, seeds."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from cross_functions import of, sampled_error, solve

import tnlib
from tnlib.formats.train.cross.cached_function import CachedFunction
from tnlib.formats.train.cross.error_estimate import ErrorEstimator


def adversaries() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    corner = oracles.hilbert((8,) * 4)
    corner[-1, -1, -1, -1] += 5.0
    sparse = np.zeros((6,) * 4)
    sparse.reshape(-1)[rng.choice(sparse.size, 40, replace=False)] = rng.standard_normal(40)
    wedge = np.abs(np.subtract.outer(*[np.add.outer(np.arange(6.0), np.arange(6.0) ** 2)] * 2))
    return {
        "noise": rng.standard_normal((6,) * 4),
        "an entry that stands out": corner,
        "forty entries": sparse,
        "a kink": wedge,
        "low rank and noise": oracles.random_train((6,) * 4, (1, 3, 3, 3, 1)) + 1e-5 * rng.standard_normal((6,) * 4),
        "superdiagonal": oracles.ghz(4, 8),
    }


@pytest.mark.parametrize("kind", adversaries())
@pytest.mark.parametrize("rtol", [1e-1, 1e-3, 1e-7])
def test_the_estimate_is_that_of_the_errors_seen(kind: str, rtol: float) -> None:
    """What is asked for is never missed by what was seen: the points that f was asked for agree with the estimate."""
    x = adversaries()[kind]
    fit, counted = solve(of(x), x.shape, rtol, rng=1)
    seen = tuple(np.array(sorted(counted.seen)).T)
    residual = np.linalg.norm((x - fit.value.full())[seen]) / np.linalg.norm(x[seen])
    if fit.converged:
        assert fit.error <= rtol
        assert residual <= 3 * rtol
    assert fit.error <= 1.5 * max(1.0, oracles.true_error(x, fit.value))


@pytest.mark.parametrize("level", [1e-2, 1e-5])
@pytest.mark.parametrize("seed", range(4))
def test_the_estimate_of_errors_that_are_everywhere(level: float, seed: int) -> None:
    """They are known to what two standard errors leave."""
    shape = (10,) * 4
    x = oracles.random_train(shape, (1, 3, 3, 3, 1), seed=seed)
    x = x + level / 100 * oracles.normal(shape, seed=seed + 9)
    fit, _ = solve(of(x), shape, 10 * level, rng=seed)
    true = oracles.true_error(x, fit.value)
    assert 0.8 * true <= fit.error <= 1.5 * true


def test_the_estimate_weighs_points_by_the_density_with_which_they_are_drawn() -> None:
    """Half of the points are the peak, which the train has; all other entries, which it lacks, have the same norm."""
    shape, peak = (30,) * 3, math.sqrt(30**3 - 1)
    f = CachedFunction("f", lambda points: np.where(points.any(axis=1), 1.0, peak), shape, 10_000, reserved=0)
    first = peak ** (1 / 3) * np.eye(30)[:1, :, None]
    error = ErrorEstimator(f, shape, np.random.default_rng(0)).estimate(tnlib.TensorTrain([first] * 3), 2000)[1]
    assert error == pytest.approx(math.sqrt(0.5), rel=0.1)


@pytest.mark.slow
def test_a_needle_is_seen_or_not_but_its_absence_is_not_certified() -> None:
    def f(points: np.ndarray) -> np.ndarray:
        return 1.0 * (points == 3).all(axis=1)

    fit, counted = solve(f, (10,) * 12, 1e-6)
    assert not fit.certified
    assert (3,) * 12 not in counted.seen
    assert fit.notes[0] == f"f is zero at all of the {counted.n} points where it was evaluated"
    assert fit.value.norm() == 0


def pole(points: np.ndarray) -> np.ndarray:
    return 1 / (1.0 + points.sum(axis=1))


@pytest.mark.slow
def test_the_budget_is_kept_and_more_calls_buy_smaller_errors() -> None:
    errors = []
    for max_calls in (1, 5, 50, 300, 1000, 3000, 10_000, 100_000):
        fit, counted = solve(pole, (12,) * 8, 1e-13, max_calls=max_calls)
        assert counted.n <= max_calls
        assert fit.converged == (max_calls == 100_000)
        assert sampled_error(pole, fit.value) <= 5 * fit.error  # cut short, it rests on few samples
        if max_calls <= 50:
            assert fit.value.norm() == 0
        errors.append(fit.error)
    assert errors[:3] == [1.0] * 3
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9


@pytest.mark.parametrize("max_rank", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(20,) * 3, (6,) * 6, (4, 9, 2, 7)], ids=str)
def test_ranks_are_capped_at_nearly_the_smallest_error(shape: tuple[int, ...], max_rank: int) -> None:
    x = oracles.hilbert(shape)
    fit, counted = solve(of(x), shape, 1e-10, max_rank=max_rank)
    best = oracles.quietly(lambda: tnlib.tt_svd(x, max_rank=max_rank))[0].error
    assert max(fit.value.ranks) <= max_rank
    assert not fit.converged
    true = oracles.true_error(x, fit.value)
    assert true <= 1.2 * best
    assert 0.9 * true <= fit.error <= 3 * true
    assert counted.n <= x.size


def test_a_cap_is_named_where_it_limits_the_error_alone() -> None:
    x = oracles.hilbert((10,) * 4)
    with pytest.warns(tnlib.ConvergenceWarning, match="max_rank=3 is reached, raise it"):
        tnlib.tt_cross(of(x), x.shape, rtol=1e-8, max_rank=3)
    with pytest.warns(tnlib.ConvergenceWarning, match="max_rank=2 is reached, raise it"):
        assert tnlib.tt_cross(of(x[0]), x.shape[1:], rtol=1e-8, max_rank=2).certified
    for enough in (20, 50):
        fit, _ = solve(of(x), x.shape, 1e-6, max_rank=enough)
        assert fit.converged
        assert oracles.true_error(x, fit.value) <= 1e-5
    with oracles.refused(ValueError, "tt_cross: max_rank must"):
        tnlib.tt_cross(of(x), x.shape, rtol=1e-3, max_rank=0)


def test_a_budget_that_is_spent_says_so() -> None:
    with pytest.warns(
        tnlib.ConvergenceWarning, match=r"tt_cross: .* misses rtol=1e-09: max_calls=400 is spent"
    ) as caught:
        tnlib.tt_cross(pole, (9,) * 6, rtol=1e-9, max_calls=400)
    assert caught[0].filename == __file__


def test_a_leg_longer_than_the_budget_is_named() -> None:
    with pytest.warns(tnlib.ConvergenceWarning, match=r"a leg of 1,000 values .* max_calls=900; split it"):
        tnlib.tt_cross(lambda k: np.cos(k[:, 0]), (1000,), rtol=1e-8, max_calls=900)


def test_noise_of_the_function_itself_ends_the_search() -> None:
    """A function that is right to six digits is not asked for twelve without end."""
    x = oracles.random_train((5, 5, 5, 5), (1, 2, 2, 2, 1))
    rounded = x.astype(np.float32)
    fit, _ = solve(of(rounded), x.shape, 0.0)
    assert oracles.true_error(rounded, fit.value) < 1e-4
    assert fit.value.dtype == np.float32


@pytest.mark.parametrize("rtol", [0.0, 1e-16, 1e-14])
def test_the_smallest_tolerances_end(rtol: float) -> None:
    x = oracles.hilbert((10, 9, 8))
    fit, _ = solve(of(x), x.shape, rtol)
    assert oracles.true_error(x, fit.value) < 1e-12


def test_seeds_decide_and_nothing_else() -> None:
    x = oracles.hilbert((12, 12, 12, 12))  # more entries than are evaluated one by one
    runs = [solve(of(x), x.shape, 1e-8, rng=rng) for rng in (None, 0, np.random.default_rng(0))]
    for fit, counted in runs[1:]:
        assert counted.seen == runs[0][1].seen
        oracles.assert_same_bits(fit.value, runs[0][0].value)
    other = solve(of(x), x.shape, 1e-8, rng=1)
    assert other[1].seen != runs[0][1].seen


def test_the_callback_sees_every_sweep_and_ends_the_search() -> None:
    seen: list[tnlib.Fit] = []

    def stop_after_three(fit: tnlib.Fit) -> None:
        seen.append(fit)
        if len(seen) == 3:
            raise StopIteration

    x = oracles.hilbert((9,) * 5)
    fit, counted = solve(of(x), x.shape, 1e-12, rng=1)
    solve(of(x), x.shape, 1e-12, rng=1, callback=seen.append)
    assert [one.n_calls for one in seen] == sorted({one.n_calls for one in seen})
    assert seen[-1].n_calls <= counted.n
    assert [one.n_iter for one in seen] == [*range(len(seen))]
    seen.clear()
    stopped, short = solve(of(x), x.shape, 1e-12, rng=1, callback=stop_after_three)
    assert len(seen) == 3
    assert short.n < counted.n
    assert fit.converged
    assert not stopped.converged
    with oracles.refused(TypeError, "tt_cross", "callback", "a Fit"):
        tnlib.tt_cross(of(x), x.shape, rtol=1e-3, callback=3)  # type: ignore[arg-type]


def test_a_climb_moves_to_the_largest_error_along_one_leg_after_the_other() -> None:
    shape, rng = (4, 3, 5, 2, 3), np.random.default_rng(7)
    x = rng.standard_normal(shape)
    train = tnlib.random.tensor_train(shape, 3, rng=1)
    missed = np.abs(x - train.full())
    points = np.stack([rng.integers(0, n, 6) for n in shape], axis=1)
    estimator = ErrorEstimator(CachedFunction("f", of(x), shape, 1000, 0), shape, np.random.default_rng(2))
    top, profiles = estimator.climb(points, train)
    expected = points.copy()
    for k in np.random.default_rng(2).permutation(len(shape)):  # every sweep of five legs is along one
        lines = np.stack([missed[(*p[:k], slice(None), *p[k + 1 :])] for p in expected])
        expected[:, k] = lines.argmax(axis=1)
        assert np.allclose(profiles[k], lines / lines.max(axis=1, keepdims=True), rtol=1e-10, atol=0.0)
    assert np.array_equal(top, expected)
