"""cp on what is hard for it: more components than needed, collinear ones, large tensors and several starts."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib

cp_module = importlib.import_module("tnlib.decompose.cp")
SEEDS = range(5)


def of_factors(factors: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return oracles.contract(tnlib.CP(np.ones(factors[0].shape[1]), list(factors))).astype(dtype)


def normal_components(shape: Sequence[int], rank: int, dtype: Any, seed: int) -> np.ndarray:
    """Components with columns in no special position to each other."""
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    return of_factors([oracles.normal((n, rank), wide, 10 * seed + k) for k, n in enumerate(shape)], dtype)


def collinear_components(
    shape: Sequence[int], rank: int, cosine: float, seed: int, dtype: Any = np.float64
) -> np.ndarray:
    """Components whose columns have about this cosine with each other, in every factor."""
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    factors = []
    for k, n in enumerate(shape):
        columns = oracles.normal((n, rank + 1), wide, 20 * seed + k)
        columns /= np.linalg.norm(columns, axis=0)
        factor = math.sqrt(cosine) * columns[:, :1] + math.sqrt(1 - cosine) * columns[:, 1:]
        factors.append(factor / np.linalg.norm(factor, axis=0))
    return of_factors(factors, dtype)


def check(x: np.ndarray, rank: int, **kwargs: Any) -> Any:
    with oracles.unchanged(x):
        fit, warned = oracles.quietly(lambda: tnlib.cp(x, rank, **kwargs))
    value, rtol = fit.value, kwargs.get("rtol")
    error, unit = oracles.true_error(x, value), oracles.slack(value)
    # A residual far above roundoff is the difference of three squares, right to nine digits and not to all of them.
    assert fit.certified
    assert error <= fit.error * (1 + 1e-9) + unit, f"the true error {error:.3g} exceeds the reported {fit.error:.3g}"
    assert fit.error <= error * (1 + 1e-6) + 100 * oracles.eps(x.dtype)
    assert rtol is None or fit.converged == (fit.error <= max(rtol, unit))
    oracles.assert_gauge(value)
    oracles.assert_warned(fit, warned)
    assert value.ranks == (rank,)
    assert value.shape == x.shape
    assert value.dtype == x.dtype
    assert fit.n_iter <= kwargs.get("n_iter", 500)
    return fit


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the Tucker cores that were made to iterate on."""
    made: list[tuple[int, ...]] = []
    real = cp_module.st_hosvd

    def watched(*args: Any) -> Any:
        core, factors = real(*args)
        made.append(core.shape)
        return core, factors

    monkeypatch.setattr(cp_module, "st_hosvd", watched)
    return made


# ------------------------------------------------------------------------------------------- more than are needed

OVER_RANKED = [
    ((6, 7, 8), 3, 5),
    ((6, 7, 8), 1, 4),
    ((10, 10, 10), 3, 4),
    ((10, 10, 10), 3, 6),
    ((4, 5, 6, 3), 2, 4),
    ((20, 20, 20), 4, 6),
    ((30, 25, 20), 3, 5),
    ((5, 6), 2, 4),
    ((3, 3, 3), 2, 6),
    ((7, 1, 5), 2, 3),
]


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "rank", "asked"), OVER_RANKED, ids=str)
@pytest.mark.parametrize("kind", ["orthonormal", "normal"])
def test_more_components_than_needed_are_exact(
    dtype: np.dtype, shape: tuple[int, ...], rank: int, asked: int, kind: str
) -> None:
    for seed in SEEDS:
        rank = min(rank, *shape) if kind == "orthonormal" else rank
        x = (oracles.random_cp if kind == "orthonormal" else normal_components)(shape, rank, dtype, seed)
        fit = check(x, asked)
        assert fit.converged
        assert fit.error < (1e-10 if np.finfo(dtype).bits == 64 else 100 * oracles.eps(dtype))


@pytest.mark.parametrize("noise", [1e-2, 1e-5, 1e-8])
def test_more_components_than_needed_fit_some_of_the_noise(noise: float) -> None:
    x = normal_components((6, 7, 8), 3, np.float64, 0)
    x = x / oracles.norm(x) + noise * oracles.normal(x.shape, seed=7) / math.sqrt(x.size)
    enough, more = check(x, 3), check(x, 5)
    assert enough.error < 1.05 * noise
    assert more.error <= enough.error * (1 + 1e-6)


# ------------------------------------------------------------------------------------------------ collinear factors


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("cosine", [0.5, 0.9, 0.98])
@pytest.mark.parametrize(("shape", "rank"), [((7, 8, 9), 3), ((15, 15, 15), 4), ((24, 24, 24), 3)], ids=str)
def test_collinear_components_are_found(dtype: type, cosine: float, shape: tuple[int, ...], rank: int) -> None:
    for seed in range(2):
        fit = check(collinear_components(shape, rank, cosine, seed, dtype), rank, n_starts=5)
        assert fit.error < 1e-8
        assert fit.converged


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("cosine", [0.999, 1 - 1e-6, 1 - 1e-10, 1.0])
def test_nearly_equal_components_do_no_harm(dtype: np.dtype, cosine: float) -> None:
    """They cannot all be told apart; what is returned is close, and says how close."""
    for shape in ((7, 8, 9), (15, 15, 15)):
        for asked in (2, 3, 5):
            fit = check(collinear_components(shape, 3, cosine, 1, dtype), asked, n_iter=60)
            assert fit.error < 0.03


def test_equal_and_opposite_slices_do_no_harm() -> None:
    one = normal_components((5, 6, 4), 2, np.float64, 0)
    for x in (
        np.repeat(one, 3, axis=0),
        np.concatenate([one, -one]),
        np.concatenate([one, 0 * one]),
        np.ones((4, 5, 6)),
    ):
        for rank in (1, 2, 4):
            fit = check(x, rank)
            assert fit.error < 1e-10 or rank < 2


def test_a_swamp_is_left() -> None:
    """Two components nearly alike and a third one: alternating sweeps alone shrink the error by little for long."""
    for seed in SEEDS:
        x = collinear_components((8, 8, 8), 2, 0.97, seed) + 0.5 * normal_components((8, 8, 8), 1, np.float64, seed)
        fit = check(x, 3, n_starts=5)  # of which some may end elsewhere
        assert fit.error < 1e-8
        assert fit.converged


# ------------------------------------------------------------------------------------------------- large tensors


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "rank"), [((30, 40, 20), 3), ((12, 12, 12, 12), 2), ((200, 30), 2), ((60, 3, 60), 2)]
)
def test_large_tensors_are_fitted_by_their_core(
    cores: list[tuple[int, ...]], dtype: np.dtype, shape: tuple[int, ...], rank: int
) -> None:
    x = normal_components(shape, rank, dtype, 1)
    x = (x / oracles.norm(x)).astype(dtype)
    fit = check(x, rank)
    assert len(cores) == 1
    assert math.prod(cores[0]) < x.size / 8
    assert fit.error < 100 * oracles.eps(dtype)
    assert fit.converged
    noisy = (x + dtype.type(1e-2) / dtype.type(math.sqrt(x.size)) * oracles.normal(shape, dtype, 5)).astype(dtype)
    size = oracles.norm(noisy - x) / oracles.norm(noisy)
    fit = check(noisy, rank)
    assert 0.9 * size < fit.error < size, "the fit is the best one, or nearly so, of all of it and not of the core"


def test_what_the_core_leaves_out_is_in_the_error(cores: list[tuple[int, ...]]) -> None:
    x = oracles.normal((30, 30, 30))
    fit = check(x, 2)
    assert cores == [(4, 4, 4)]
    assert fit.error > 0.9


@pytest.mark.parametrize("n_iter", [1, 2, 3, 5, 31, 32, 40])
@pytest.mark.parametrize("shape", [(6, 7, 8), (24, 24, 24)], ids=str)
def test_no_more_sweeps_than_asked_for(n_iter: int, shape: tuple[int, ...]) -> None:
    """On the tensor and on its core together."""
    for rank in (2, 4):
        check(oracles.normal(shape), rank, n_iter=n_iter)
        check(collinear_components(shape, 3, 0.999, 0), rank, n_iter=n_iter)


@pytest.mark.parametrize("shape", [(6, 7, 8), (24, 24, 24)], ids=str)
def test_errors_never_rise_with_sweeps(shape: tuple[int, ...]) -> None:
    x = collinear_components(shape, 3, 0.95, 2) + 1e-4 * normal_components(shape, 2, np.float64, 1)
    errors = [check(x, 3, n_iter=n).error for n in (2, 4, 8, 16, 30, 31, 35, 60, 200)]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(errors))


def test_a_tolerance_ends_the_iteration_on_a_core_too() -> None:
    x = normal_components((24, 24, 24), 3, np.float64, 0)
    x = x / oracles.norm(x) + 1e-3 * oracles.normal(x.shape, seed=3) / math.sqrt(x.size)
    loose, tight = check(x, 3, rtol=0.3), check(x, 3)
    assert loose.converged
    assert loose.error <= 0.3
    assert loose.n_iter < tight.n_iter
    assert not check(x, 3, rtol=1e-5).converged


# ------------------------------------------------------------------------------------------------- several starts


@pytest.mark.parametrize("shape", [(5, 5, 5), (24, 24, 24)], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
def test_more_starts_are_never_worse(shape: tuple[int, ...], dtype: type) -> None:
    x = oracles.normal(shape, dtype)
    errors = [check(x, 4, n_starts=n, n_iter=25).error for n in (1, 2, 4, 6)]
    assert all(b <= a * (1 + 100 * oracles.eps(dtype)) for a, b in itertools.pairwise(errors))


def test_an_exact_fit_needs_no_more_starts() -> None:
    x = oracles.random_cp((6, 7, 8), 2)
    one, many = check(x, 2), check(x, 2, n_starts=50)
    oracles.assert_same_bits(one.value, many.value)
    assert one.n_iter == many.n_iter


@pytest.mark.parametrize("shape", [(5, 5, 5), (24, 24, 24)], ids=str)
def test_the_same_numbers_are_drawn(shape: tuple[int, ...]) -> None:
    x = oracles.normal(shape)
    one, other = (check(x, 3, n_starts=3, rng=7, n_iter=8) for _ in range(2))
    oracles.assert_same_bits(one.value, other.value)
    assert one.error == other.error


@pytest.mark.parametrize("c", [1e-200, 1e-110, 1e110, 1e200])
@pytest.mark.parametrize("shape", [(5, 6, 7), (24, 24, 24)], ids=str)
def test_hard_fits_are_free_of_scale(c: float, shape: tuple[int, ...]) -> None:
    x = collinear_components(shape, 3, 0.95, 0)
    fit = check(c * x, 3)
    assert fit.error < 1e-8
    assert fit.value.norm() == pytest.approx(c * oracles.norm(x), rel=1e-7)
