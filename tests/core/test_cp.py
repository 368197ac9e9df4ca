"""cp: components found, gauge, honesty of errors and stops, over-ranked and degenerate input."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
import pytest

import tnlib


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "rank"), [((5, 6, 7), 3), ((4, 5, 3, 4), 2), ((8, 6), 1), ((7, 1, 5), 1)], ids=str)
def test_components_are_found(dtype: np.dtype, shape: tuple[int, ...], rank: int) -> None:
    x = oracles.random_cp(shape, rank, dtype)
    fit = tnlib.cp(x, rank)
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert fit.error < 100 * oracles.eps(dtype)
    assert fit.converged
    assert fit.value.dtype == dtype
    np.testing.assert_allclose(fit.value.weights, np.arange(rank, 0, -1), rtol=2000 * oracles.eps(dtype))


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_the_gauge_is_that_of_the_tensor_and_not_of_the_guess(dtype: np.dtype) -> None:
    x = oracles.random_cp((5, 6, 7), 3, dtype, seed=2)
    one, other = (tnlib.cp(x, 3, n_starts=n, rng=n).value for n in (1, 3))
    turned = tnlib.cp(-x, 3).value
    for a, b, c in zip(one.factors[:-1], other.factors[:-1], turned.factors[:-1], strict=True):
        oracles.assert_close(a, b, dtype, factor=2e4)
        oracles.assert_close(a, c, dtype, factor=2e4)
    oracles.assert_close(one.factors[-1], -turned.factors[-1], dtype, factor=2e4)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_error_has_no_floor_at_the_root_of_eps(dtype: np.dtype) -> None:
    e = oracles.eps(dtype)
    exact = oracles.random_cp((6, 7, 8), 1, dtype)
    assert tnlib.cp(exact, 1).error < 30 * e
    noise = oracles.normal(exact.shape, dtype, seed=1)
    x = (exact + 1e4 * e / oracles.norm(noise) * noise).astype(dtype)
    fit = tnlib.cp(x, 1)
    oracles.assert_fit(fit, x)
    assert 0.5e4 * e < fit.error < 1.1e4 * e


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("rank", [2, 3, 6, 12, 20])
def test_more_components_than_needed_are_allowed(dtype: np.dtype, rank: int) -> None:
    x = oracles.random_cp((4, 5, 6), 1, dtype)
    fit, _ = oracles.quietly(lambda: tnlib.cp(x, rank))
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert fit.value.ranks == (rank,)
    assert fit.error < (1000 * oracles.eps(dtype) if rank <= 6 else 10 * np.sqrt(oracles.eps(dtype)))
    errors = [oracles.quietly(lambda n=n: tnlib.cp(x, rank, n_iter=n))[0].error for n in (1, 2, 3, 4)]
    assert all(b <= a * 1.01 + oracles.slack(fit.value) for a, b in itertools.pairwise(errors))


def test_errors_never_rise_with_sweeps() -> None:
    x = oracles.normal((5, 6, 7))
    errors = [oracles.quietly(lambda n=n: tnlib.cp(x, 4, n_iter=n))[0].error for n in (1, 2, 4, 8, 16, 32)]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(errors))
    assert errors[-1] < errors[0]


def test_a_sweep_solves_the_normal_equations() -> None:
    """At a stationary point the residual is orthogonal to what every single factor can reach."""
    for dtype in (np.float64, np.complex128):
        x = oracles.normal((4, 5, 6), dtype)
        value = tnlib.cp(x, 2, n_iter=5000).value
        residual = x - value.full()
        a, b, c = value.factors
        for subscripts, others in (("ijk,jr,kr->ir", (b, c)), ("ijk,ir,kr->jr", (a, c)), ("ijk,ir,jr->kr", (a, b))):
            gradient = np.einsum(subscripts, residual, *(f.conj() for f in others))
            assert np.abs(gradient).max() < 2e-2 * oracles.norm(x)
        assert 0.3 < oracles.true_error(x, value) < 1


def test_the_tolerance_stops_the_iteration() -> None:
    x = oracles.random_cp((5, 6, 7), 3) + 1e-3 * oracles.normal((5, 6, 7))
    loose, tight = tnlib.cp(x, 3, rtol=0.2), tnlib.cp(x, 3)
    assert loose.converged
    assert loose.error <= 0.2
    assert loose.n_iter <= tight.n_iter
    assert tight.error < 0.02


def test_a_missed_tolerance_is_said() -> None:
    x = oracles.normal((5, 6, 7))
    with pytest.warns(tnlib.ConvergenceWarning, match="cp: the error .* misses rtol=0.01"):
        fit = tnlib.cp(x, 2, rtol=0.01)
    assert not fit.converged
    oracles.assert_fit(fit, x, rtol=0.01)


def test_running_out_of_sweeps_is_said() -> None:
    x = oracles.normal((5, 6, 7))
    with pytest.warns(tnlib.ConvergenceWarning, match="cp: still improving after 2 sweeps"):
        fit = tnlib.cp(x, 3, n_iter=2)
    assert not fit.converged
    assert fit.n_iter == 2
    assert "NOT converged" in repr(fit)


def test_more_starts_are_never_worse_and_reproducible() -> None:
    x = oracles.normal((4, 4, 4))

    def run(**kwargs):
        return oracles.quietly(lambda: tnlib.cp(x, 4, n_iter=30, **kwargs))[0]

    assert run(n_starts=4).error <= run().error * (1 + 1e-12)
    oracles.assert_same_bits(run(n_starts=3, rng=5).value, run(n_starts=3, rng=np.random.default_rng(5)).value)
    oracles.assert_same_bits(run(n_starts=3).value, run(n_starts=3, rng=0).value)
    assert run(n_starts=2, rng=1).error != run(n_starts=2, rng=2).error or run().error == run(n_starts=2, rng=1).error


def test_nothing_is_drawn_from_the_global_generator() -> None:
    np.random.seed(0)  # noqa: NPY002 - the global state is what is watched
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    oracles.quietly(lambda: tnlib.cp(oracles.normal((3, 3, 3)), 5, n_iter=3, n_starts=2))
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("c", [1.0, 1e-25, 1e25])
def test_nonnegative_factors(dtype: type, c: float) -> None:
    rng = np.random.default_rng(0)
    factors = [rng.uniform(size=(n, 2)) for n in (4, 5, 6)]
    x = (c * oracles.contract(tnlib.CP(np.ones(2), factors))).astype(dtype)
    with oracles.unchanged(x):
        fit, _ = oracles.quietly(lambda: tnlib.cp(x, 2, constraint="nonnegative"))
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert all((factor >= 0).all() for factor in fit.value.factors)
    assert fit.value.dtype == dtype
    assert fit.error < 0.01


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("constraint", ["monotone", "unimodal"])
def test_constrained_columns(constraint: str, dtype: type) -> None:
    rng = np.random.default_rng(0)
    rising = [np.cumsum(rng.random((n, 2)), axis=0) for n in (6, 7, 8)]
    x = np.einsum("ar,br,cr->abc", *rising).astype(dtype)
    fit, _ = oracles.quietly(lambda: tnlib.cp(x, 2, constraint=constraint, n_iter=50))
    oracles.assert_fit(fit, x, tight=False)
    assert fit.error < 0.5
    for factor in fit.value.factors:
        steps = np.diff(factor, axis=0)
        unit = 8 * np.finfo(dtype).eps
        if constraint == "monotone":
            assert (steps >= -unit).all()
        else:  # once a column falls, it never rises again
            assert not (np.maximum.accumulate(steps < -unit, axis=0) & (steps > unit)).any()


def test_nonnegative_factors_of_data_that_are_not() -> None:
    x = oracles.normal((4, 5, 6))
    fit, warned = oracles.quietly(lambda: tnlib.cp(x, 2, constraint="nonnegative"))
    oracles.assert_fit(fit, x)
    oracles.assert_warned(fit, warned)
    assert all((factor >= 0).all() for factor in fit.value.factors)
    assert 0.5 < fit.error <= 1 + 1e-12


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_zero(dtype: np.dtype, rank: int) -> None:
    fit = tnlib.cp(np.zeros((3, 4, 5), dtype), rank)
    assert fit.error == 0
    assert not fit.value.weights.any()
    oracles.assert_gauge(fit.value)


def test_a_tensor_of_infimum_but_no_minimum() -> None:
    """The rank-three tensor a a b + a b a + b a a is a limit of rank two: components diverge, and cp stays honest."""
    a, b = np.eye(2)
    x = sum(np.einsum("i,j,k", *vectors) for vectors in ((a, a, b), (a, b, a), (b, a, a)))
    fit, warned = oracles.quietly(lambda: tnlib.cp(x, 2, n_iter=200, n_starts=4))
    oracles.assert_fit(fit, x)
    oracles.assert_warned(fit, warned)
    assert fit.error < 0.3
    assert fit.value.weights.max() > 2


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: tnlib.cp(np.ones(3), 1), ValueError, ["x must have at least two legs", "(3,)"]),
        (lambda: tnlib.cp(np.ones((2, 2)), 1, constraint="positive"), ValueError, ["constraint must", "'positive'"]),
        (lambda: tnlib.cp(np.ones((2, 2)), 1, constraint=[]), ValueError, ["constraint must", "[]"]),
        (lambda: tnlib.cp(1j * np.ones((2, 2)), 1, constraint="nonnegative"), TypeError, ["constraint", "complex"]),
        (lambda: tnlib.cp(np.ones((2, 2)), 1, rng="a"), TypeError, ["rng must", "'a'"]),
        (lambda: tnlib.cp(np.ones((2, 2)), 1, rng=1.5), TypeError, ["rng must", "1.5"]),
        (lambda: tnlib.cp(np.ones((2, 2)), 1, rng=True), TypeError, ["rng must", "True"]),
        (lambda: tnlib.cp(np.ones((2, 2)), 1, rng=-1), ValueError, ["rng must", "-1"]),
    ],
)
def test_impossible_arguments_are_refused(call: object, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "cp: ", "got", *words):
        call()
