"""cp: components found, gauge, certified errors, stops, starts, Tucker cores of large tensors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracles
import pytest
from format_cases import check_fit, collinear_components, normal_components

import tnlib
from tnlib.formats.cp.decomposition import core_ranks


@oracles.each_dtype
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


@oracles.each_dtype
def test_the_gauge_is_that_of_the_tensor_and_not_of_the_guess(dtype: np.dtype) -> None:
    x = oracles.random_cp((5, 6, 7), 3, dtype, seed=2)
    one, other = (tnlib.cp(x, 3, n_starts=n, rng=n).value for n in (1, 3))
    turned = tnlib.cp(-x, 3).value
    for a, b, c in zip(one.factors[:-1], other.factors[:-1], turned.factors[:-1], strict=True):
        oracles.assert_close(a, b, dtype, factor=2e4)
        oracles.assert_close(a, c, dtype, factor=2e4)
    oracles.assert_close(one.factors[-1], -turned.factors[-1], dtype, factor=2e4)


@oracles.each_dtype
def test_error_has_no_floor_at_the_root_of_eps(dtype: np.dtype) -> None:
    e = oracles.eps(dtype)
    exact = oracles.random_cp((6, 7, 8), 1, dtype)
    assert tnlib.cp(exact, 1).error < 30 * e
    noise = oracles.normal(exact.shape, dtype, seed=1)
    x = (exact + 1e4 * e / oracles.norm(noise) * noise).astype(dtype)
    fit = tnlib.cp(x, 1)
    oracles.assert_fit(fit, x)
    assert 0.5e4 * e < fit.error < 1.1e4 * e


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


def test_running_out_of_sweeps_is_said() -> None:
    x = oracles.normal((5, 6, 7))
    with pytest.warns(tnlib.ConvergenceWarning, match="cp: still improving after 2 sweeps"):
        fit = tnlib.cp(x, 3, n_iter=2)
    assert not fit.converged
    assert fit.n_iter == 2
    assert "NOT converged" in repr(fit)


def test_starts_are_reproducible() -> None:
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


@oracles.each_dtype
@pytest.mark.parametrize("rank", [1, 3])
def test_zero(dtype: np.dtype, rank: int) -> None:
    fit = tnlib.cp(np.zeros((3, 4, 5), dtype), rank)
    assert fit.error == 0
    assert not fit.value.weights.any()
    oracles.assert_gauge(fit.value)


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


@oracles.each_dtype
@pytest.mark.parametrize(
    ("shape", "rank"), [((30, 40, 20), 3), ((12, 12, 12, 12), 2), ((200, 30), 2), ((60, 3, 60), 2)]
)
def test_large_tensors_are_fitted_by_their_core(dtype: np.dtype, shape: tuple[int, ...], rank: int) -> None:
    ranks = core_ranks(shape, rank)
    assert ranks is not None
    assert math.prod(ranks) < math.prod(shape) / 8
    x = normal_components(shape, rank, dtype, 1)
    x = (x / oracles.norm(x)).astype(dtype)
    fit = check_fit(x, rank)
    assert fit.error < 100 * oracles.eps(dtype)
    assert fit.converged
    noisy = (x + dtype.type(1e-2) / dtype.type(math.sqrt(x.size)) * oracles.normal(shape, dtype, 5)).astype(dtype)
    size = oracles.norm(noisy - x) / oracles.norm(noisy)
    fit = check_fit(noisy, rank)
    assert 0.9 * size < fit.error < size, "the fit is the best one, or nearly so, of all of it and not of the core"


def test_the_discarded_part_of_a_core_is_in_the_error() -> None:
    assert core_ranks((30, 30, 30), 2) == (4, 4, 4)
    assert core_ranks((6, 7, 8), 2) is None
    assert check_fit(oracles.normal((30, 30, 30)), 2).error > 0.9


@pytest.mark.parametrize("n_iter", [1, 2, 3, 5, 31, 32, 40])
@pytest.mark.parametrize("shape", [(6, 7, 8), (24, 24, 24)], ids=str)
def test_no_more_sweeps_than_asked_for(n_iter: int, shape: tuple[int, ...]) -> None:
    """On the tensor and on its core together."""
    for rank in (2, 4):
        check_fit(oracles.normal(shape), rank, n_iter=n_iter)
        check_fit(collinear_components(shape, 3, 0.999, 0), rank, n_iter=n_iter)


@pytest.mark.parametrize("shape", [(6, 7, 8), (24, 24, 24)], ids=str)
def test_errors_never_rise_with_sweeps(shape: tuple[int, ...]) -> None:
    x = collinear_components(shape, 3, 0.95, 2) + 1e-4 * normal_components(shape, 2, np.float64, 1)
    errors = [check_fit(x, 3, n_iter=n).error for n in (2, 4, 8, 16, 30, 31, 35, 60, 200)]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("shape", [(6, 7, 8), (24, 24, 24)], ids=str)
def test_a_tolerance_ends_the_iteration(shape: tuple[int, ...]) -> None:
    """On the tensor and on its core."""
    x = normal_components(shape, 3, np.float64, 0)
    x = x / oracles.norm(x) + 1e-3 * oracles.normal(x.shape, seed=3) / math.sqrt(x.size)
    loose, tight = check_fit(x, 3, rtol=0.3), check_fit(x, 3)
    assert loose.converged
    assert loose.error <= 0.3
    assert loose.n_iter < tight.n_iter
    assert not check_fit(x, 3, rtol=1e-5).converged


@pytest.mark.parametrize("shape", [(5, 5, 5), (24, 24, 24)], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
def test_more_starts_are_never_worse(shape: tuple[int, ...], dtype: type) -> None:
    x = oracles.normal(shape, dtype)
    errors = [check_fit(x, 4, n_starts=n, n_iter=25).error for n in (1, 2, 4, 6)]
    assert all(b <= a * (1 + 100 * oracles.eps(dtype)) for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("shape", [(6, 7, 8), (40, 50, 60)])  # the large one is fitted on its Tucker core
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_a_fit_goes_on_from_another_one(shape: tuple[int, ...], dtype: type) -> None:
    x = tnlib.random.cp(shape, 3, rng=0).full().astype(dtype)
    few, _ = oracles.quietly(lambda: tnlib.cp(x, 3, n_iter=5))
    more, _ = oracles.quietly(lambda: tnlib.cp(x, 3, n_iter=1, init=few.value))
    assert more.error <= few.error * (1 + 1e-6) + oracles.slack(few.value)
    done = tnlib.cp(x, 3)
    for y in (x, np.ma.array(x, mask=oracles.normal(shape) > 1)):
        again, _ = oracles.quietly(lambda y=y: tnlib.cp(y, 3, init=done.value))
        assert again.n_iter <= 4
        assert again.error <= 2 * done.error + 1e4 * np.finfo(dtype).eps


def test_guesses_that_do_not_fit_are_refused() -> None:
    x, guess = oracles.normal((3, 4, 5)), tnlib.random.cp((3, 4, 5), 2, rng=0)
    with oracles.refused(ValueError, "cp: init must have the shape of x, (3, 4, 5), and rank 3, got (3, 4, 5) and 2"):
        tnlib.cp(x, 3, init=guess)
    with oracles.refused(ValueError, "cp: init must", "(4, 3, 5)"):
        tnlib.cp(x.swapaxes(0, 1), 2, init=guess)
    with oracles.refused(TypeError, "cp: init must be a CP, got a list"):
        tnlib.cp(x, 2, init=list(guess.factors))
    with oracles.refused(TypeError, "cp: init must be real"):
        tnlib.cp(x, 2, init=tnlib.CP(np.ones(2), [1j * factor for factor in guess.factors]))


def test_an_exact_fit_needs_no_more_starts() -> None:
    x = oracles.random_cp((6, 7, 8), 2)
    one, many = check_fit(x, 2), check_fit(x, 2, n_starts=50)
    oracles.assert_same_bits(one.value, many.value)
    assert one.n_iter == many.n_iter
