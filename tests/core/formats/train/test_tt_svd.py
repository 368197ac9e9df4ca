"""tt_svd: ranks, budget over bonds, gauge, long trains, degenerate input."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

import tnlib

SHAPES = [
    ((4, 5, 6), (1, 3, 2, 1)),
    ((2, 3, 4, 3, 2), (1, 2, 4, 3, 2, 1)),
    ((8, 8), (1, 5, 1)),
    ((2,) * 12, (1, *[2] * 11, 1)),
    ((1, 4, 1, 5, 1), (1, 1, 3, 3, 1, 1)),
]


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "ranks"), SHAPES, ids=str)
def test_ranks_of_a_random_train_are_recovered(dtype: np.dtype, shape: tuple, ranks: tuple) -> None:
    x = oracles.random_train(shape, ranks, dtype)
    fit = tnlib.tt_svd(x)
    assert fit.value.ranks == ranks
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    oracles.assert_close(fit.value.full(), x, dtype, factor=500)
    assert all(core.dtype == dtype for core in fit.value.cores)


@pytest.mark.parametrize("d", [12, 16])
@pytest.mark.parametrize("seed", range(6))
def test_roundoff_of_multiplying_out_is_no_rank(d: int, seed: int) -> None:
    """Every product of cores rounds every entry; the singular values of that noise grow with the count of cores."""
    x = oracles.dense_train(oracles.random_cores((2,) * d, [1] * (d + 1), seed=seed))
    assert tnlib.tt_svd(x).value.ranks == (1,) * (d + 1)


@pytest.mark.parametrize("rtol", [1e-12, 1e-6, 1e-2, 0.1, 0.5])
def test_the_error_of_a_long_train_is_that_of_the_whole(rtol: float) -> None:
    i = np.arange(2**12, dtype=float)
    x = (np.sin(i / 50) * np.exp(-i / 900) + 1 / (1 + i)).reshape((2,) * 12)
    fit = tnlib.tt_svd(x, rtol=rtol)
    oracles.assert_fit(fit, x, rtol=rtol)
    assert fit.value.n_parameters < x.size


@pytest.mark.parametrize("shape", [(2,) * 10, (4, 6, 5, 3), (3, 20, 3)], ids=str)
@pytest.mark.parametrize("rtol", [1e-8, 1e-3, 0.1, 0.6])
def test_no_rank_exceeds_that_of_an_equal_share(shape: tuple[int, ...], rtol: float) -> None:
    """Every bond may discard at least rtol / sqrt(d - 1) of the norm, and a sweep only removes from its tail."""
    for x in (
        oracles.hilbert(shape),
        oracles.normal(shape, seed=1) + 20 * oracles.random_train(shape, [1] * (len(shape) + 1)),
    ):
        fit = tnlib.tt_svd(x, rtol=rtol)
        oracles.assert_fit(fit, x, rtol=rtol)
        share = rtol * np.linalg.norm(x) / np.sqrt(x.ndim - 1)
        for k in range(1, x.ndim):
            s = np.linalg.svd(x.reshape(int(np.prod(shape[:k])), -1), compute_uv=False)
            tails = np.sqrt(np.cumsum(s[::-1] ** 2)[::-1])
            assert fit.value.ranks[k] <= max(1, np.count_nonzero(tails > share * (1 - 1e-6)))


def test_the_whole_tolerance_is_used() -> None:
    """A budget that nobody else needs goes to the bond that does: only the last bond of this train is not trivial."""
    s = 0.8 ** np.arange(16)
    x = oracles.with_spectrum(s, 16, 16).reshape(1, 1, 1, 16, 16)
    assert tnlib.tt_svd(x, rtol=0.05).value.ranks[-2] == tnlib.svd(x[0, 0, 0], rtol=0.05).value.ranks[0]


def test_error_at_given_ranks_is_quasi_optimal() -> None:
    x = oracles.normal((4, 5, 6, 3))
    for cap in (1, 2, 3, 5):
        fit = tnlib.tt_svd(x, max_rank=cap)
        oracles.assert_fit(fit, x)
        tails = [
            np.linalg.svd(x.reshape(int(np.prod(x.shape[:k])), -1), compute_uv=False)[cap:] for k in range(1, x.ndim)
        ]
        bound = np.sqrt(sum(np.sum(t**2) for t in tails)) / np.linalg.norm(x)
        assert max(np.linalg.norm(t) for t in tails) / np.linalg.norm(x) <= fit.error * (1 + 1e-12)
        assert fit.error <= bound * (1 + 1e-12)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_the_center_carries_the_norm(dtype: np.dtype) -> None:
    x = oracles.normal((3, 4, 5), dtype)
    value = tnlib.tt_svd(x).value
    assert oracles.norm(value.cores[-1]) == pytest.approx(oracles.norm(x), rel=64 * oracles.eps(dtype))
    assert value.norm() == pytest.approx(oracles.norm(x), rel=64 * oracles.eps(dtype))
    assert value.log_scale == 0


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_one_leg(dtype: np.dtype) -> None:
    x = oracles.normal((5,), dtype)
    fit = tnlib.tt_svd(x, rtol=0.5, max_rank=1)
    assert fit.value.ranks == (1, 1)
    assert fit.error == 0
    np.testing.assert_array_equal(fit.value.full(), x)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (1, 1, 1)], ids=str)
def test_zero(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    for kwargs in ({}, {"rtol": 0.1}, {"rtol": 0.0}, {"max_rank": 2}):
        fit = tnlib.tt_svd(np.zeros(shape, dtype), **kwargs)
        assert fit.value.ranks == (1,) * (len(shape) + 1)
        assert fit.error == 0
        assert not fit.value.full().any()


def test_a_cap_through_equal_values_names_its_bonds() -> None:
    x = oracles.ghz(4, 3)
    with pytest.warns(tnlib.DegenerateCutWarning, match="tt_svd: max_rank separates equal .* at bond 1"):
        fit = tnlib.tt_svd(x, max_rank=2)
    oracles.assert_fit(fit, x)
    assert fit.value.ranks == (1, 2, 2, 2, 1)
    assert fit.error == pytest.approx(np.sqrt(1 / 3))
    assert tnlib.tt_svd(x).notes == ()
    assert tnlib.tt_svd(x, max_rank=3).value.ranks == (1, 3, 3, 3, 1)


def test_a_missed_tolerance_is_said() -> None:
    x = oracles.normal((5, 5, 5))
    with pytest.warns(tnlib.ConvergenceWarning, match="tt_svd: the error .* misses rtol=0.01"):
        fit = tnlib.tt_svd(x, rtol=0.01, max_rank=2)
    assert not fit.converged
    oracles.assert_fit(fit, x, rtol=0.01)


def test_a_cap_on_one_bond_does_not_loosen_the_others() -> None:
    """What the cap discards beyond its share is lost; it neither raises nor lowers what later bonds may discard."""
    s = 0.7 ** np.arange(12)
    x = np.multiply.outer(oracles.with_spectrum(s, 12, 12), oracles.with_spectrum(s, 12, 12, seed=5))
    fit, _ = oracles.quietly(lambda: tnlib.tt_svd(x, rtol=0.02, max_rank=6))
    free = tnlib.tt_svd(x, rtol=0.02)
    assert free.value.ranks[1] > 6
    assert fit.value.ranks == (1, 6, 1, 6, 1)
    oracles.assert_fit(fit, x, rtol=0.02)


def test_errors_of_single_precision_are_sums_in_double() -> None:
    x = oracles.with_spectrum([1.0, 3e-4, 1e-4, 2e-5], 8, 8, np.float32).reshape(2, 4, 4, 2)
    fit = tnlib.tt_svd(x, rtol=1e-5)
    oracles.assert_fit(fit, x, rtol=1e-5)
    assert fit.value.ranks[2] == 4
