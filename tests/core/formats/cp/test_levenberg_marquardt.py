"""cp where alternating least squares is slow: over-ranked, collinear and diverging components."""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracles
import pytest
from format_cases import check_fit, collinear_components, normal_components
from slow_cases import mostly_slow

import tnlib

SEEDS = range(3)

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


@oracles.each_dtype
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


def test_a_tensor_of_infimum_but_no_minimum() -> None:
    """The rank-three tensor a a b + a b a + b a a is a limit of rank two: components diverge, and cp stays honest."""
    a, b = np.eye(2)
    x = sum(np.einsum("i,j,k", *vectors) for vectors in ((a, a, b), (a, b, a), (b, a, a)))
    fit, warned = oracles.quietly(lambda: tnlib.cp(x, 2, n_iter=200, n_starts=4))
    oracles.assert_fit(fit, x)
    oracles.assert_warned(fit, warned)
    assert fit.error < 0.3
    assert fit.value.weights.max() > 2


@oracles.each_dtype
@pytest.mark.parametrize(("shape", "rank", "fitted_rank"), OVER_RANKED, ids=str)
@pytest.mark.parametrize("kind", mostly_slow(["orthonormal", "normal"], ["normal"]))
def test_more_components_than_needed_are_exact(
    dtype: np.dtype, shape: tuple[int, ...], rank: int, fitted_rank: int, kind: str
) -> None:
    for seed in SEEDS:
        rank = min(rank, *shape) if kind == "orthonormal" else rank
        x = (oracles.random_cp if kind == "orthonormal" else normal_components)(shape, rank, dtype, seed)
        fit = check_fit(x, fitted_rank)
        assert fit.converged
        assert fit.error < (1e-10 if np.finfo(dtype).bits == 64 else 100 * oracles.eps(dtype))


@pytest.mark.parametrize("noise", [1e-2, 1e-5, 1e-8])
def test_more_components_than_needed_fit_some_of_the_noise(noise: float) -> None:
    x = normal_components((6, 7, 8), 3, np.float64, 0)
    x = x / oracles.norm(x) + noise * oracles.normal(x.shape, seed=7) / math.sqrt(x.size)
    enough, more = check_fit(x, 3), check_fit(x, 5)
    assert enough.error < 1.05 * noise
    assert more.error <= enough.error * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("cosine", [0.5, 0.9, 0.98])
@pytest.mark.parametrize(("shape", "rank"), [((7, 8, 9), 3), ((15, 15, 15), 4)], ids=str)
def test_collinear_components_are_found(dtype: type, cosine: float, shape: tuple[int, ...], rank: int) -> None:
    for seed in range(2):
        fit = check_fit(collinear_components(shape, rank, cosine, seed, dtype), rank, n_starts=5)
        assert fit.error < 1e-8
        assert fit.converged


@oracles.each_dtype
@pytest.mark.parametrize("cosine", [0.999, 1 - 1e-10, 1.0])
def test_nearly_equal_components_do_no_harm(dtype: np.dtype, cosine: float) -> None:
    """They cannot all be told apart; what is returned is close, and says how close."""
    for shape in ((7, 8, 9), (15, 15, 15)):
        for rank in (2, 3, 5):
            fit = check_fit(collinear_components(shape, 3, cosine, 1, dtype), rank, n_iter=60)
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
            fit = check_fit(x, rank)
            assert fit.error < 1e-10 or rank < 2


@pytest.mark.parametrize("seed", [3, 106, 107, 161, 186])
def test_components_that_alternating_sweeps_let_diverge_are_shrunk(seed: int) -> None:
    """After 30 sweeps their weights reach 100 times the norm of the tensor."""
    fit = check_fit(normal_components((6, 7, 8), 3, np.float64, seed), 5)
    assert fit.converged
    assert fit.error < 1e-10
    assert fit.n_iter < 400
