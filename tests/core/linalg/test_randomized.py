"""Randomized subspace iteration: errors within 0.1 % of the smallest ones, otherwise those of LAPACK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
from slow_cases import mostly_slow

import tnlib
from tnlib.linalg.randomized import randomized_svd

N = 520  # of the smaller side

# of N values, descending
SPECTRA: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "1 / k": lambda k: 1 / (1.0 + k),
    "1 / sqrt(k)": lambda k: (1.0 + k) ** -0.5,
    "1 / k^3": lambda k: (1.0 + k) ** -3.0,
    "exponential": lambda k: np.exp(-k / 10),
    "slowly exponential": lambda k: np.exp(-k / 150),
    "flat with a step at 40": lambda k: np.where(k < 40, 1.0, 0.01),
    "flat with a small step at 40": lambda k: np.where(k < 40, 1.0, 0.9),
    "flat with a step at 45": lambda k: np.where(k < 45, 1.0, 1e-3),
    "flat": lambda k: np.ones(len(k)),
    "one large": lambda k: np.where(k < 1, 1.0, 1e-3),
    "one large over noise": lambda k: np.where(k < 1, 1.0, 1e-7),
    "staircase": lambda k: 0.5 ** (k // 7),
    "thirty large": lambda k: np.where(k < 30, 1.0, 1e-4 / (1 + k)),
}
SHAPES = [(N, 600), (700, N)]


def with_spectrum(name: str, m: int, n: int, dtype: Any = np.float64) -> np.ndarray:
    return oracles.with_spectrum(SPECTRA[name](np.arange(N)), m, n, dtype)


def converges(a: np.ndarray, rank: int) -> bool:
    """Whether the iteration has a result; where it has none `svd` calls LAPACK."""
    return randomized_svd(a, rank, norm=oracles.norm(a), negligible=0.0) is not None


def assert_leading(fit: Any, a: np.ndarray, s: np.ndarray, rank: int) -> None:
    """Within 0.1 % of the best error at `rank`, singular values `s` being known, and in the gauge."""
    oracles.assert_fit(fit, a)
    oracles.assert_gauge(fit.value)
    eps = oracles.eps(a.dtype)
    assert fit.value.dtype == a.dtype
    assert fit.value.ranks == (rank,)
    best = np.linalg.norm(s[rank:]) / np.linalg.norm(s)
    error = oracles.true_error(a, fit.value)
    assert error <= 1.001 * best + 64 * eps
    assert error >= best - 64 * eps
    assert (fit.value.s <= s[:rank] * (1 + 100 * eps) + 64 * eps * s[0]).all(), "no projection has larger ones"


@pytest.mark.parametrize("spectrum", mostly_slow(SPECTRA, [*SPECTRA][::3]))
@pytest.mark.parametrize("shape", [pytest.param(SHAPES[0], marks=pytest.mark.slow), SHAPES[1]], ids=str)
def test_errors_are_the_best_ones(spectrum: str, shape: tuple[int, int]) -> None:
    a = with_spectrum(spectrum, *shape)
    for rank in (1, 40):
        with oracles.unchanged(a):
            fit, _ = oracles.quietly(lambda rank=rank: tnlib.svd(a, max_rank=rank))
        assert_leading(fit, a, SPECTRA[spectrum](np.arange(N)), rank)
    if spectrum in ("1 / k", "1 / k^3", "flat with a step at 40", "slowly exponential"):
        assert converges(a, 1) or converges(a, 40), "the iteration is for such matrices"


@pytest.mark.parametrize("dtype", mostly_slow([np.float32, np.complex64], [np.complex64]))
@pytest.mark.parametrize(
    "spectrum",
    mostly_slow(
        ["1 / k", "1 / k^3", "exponential", "flat with a step at 40", "one large over noise"], ["1 / k", "exponential"]
    ),
)
def test_errors_are_the_best_ones_in_single_precision(spectrum: str, dtype: type) -> None:
    a = with_spectrum(spectrum, N, N, dtype)
    fit, _ = oracles.quietly(lambda: tnlib.svd(a, max_rank=40))
    s = np.linalg.svd(oracles.wide(a), compute_uv=False)  # rounding to single precision has changed them
    above = int(np.count_nonzero(s > 32 * oracles.eps(dtype) * np.linalg.norm(s)))  # of the rest nothing is known
    assert_leading(fit, a, s, min(40, above))


@oracles.each_dtype
@pytest.mark.parametrize("rank", [1, 10, 39])
def test_a_rank_below_the_cap_is_the_numerical_one(dtype: np.dtype, rank: int) -> None:
    a = oracles.with_spectrum(np.linspace(1, 0.1, rank), N, 600, dtype)
    fit = tnlib.svd(a, max_rank=40)
    oracles.assert_fit(fit, a)
    oracles.assert_gauge(fit.value)
    assert fit.value.ranks == (rank,)
    assert fit.error < 100 * oracles.eps(dtype)


@oracles.each_dtype
@pytest.mark.parametrize("smallest", mostly_slow([0.5, 1e-3, 1.1e-4, 1.2e-5, 0.9e-5, 1e-7], [1.2e-5]))
def test_a_matrix_of_the_rank_of_the_cap_is_exact(dtype: np.dtype, smallest: float) -> None:
    """All of it is kept, so the error is roundoff, however small the last value is."""
    a = oracles.with_spectrum(np.geomspace(1, smallest, 40), N, 600, dtype)
    for rtol in (None, 1e-4 if np.finfo(dtype).bits == 32 else 1e-12):
        fit = tnlib.svd(a, max_rank=40, rtol=rtol)
        oracles.assert_fit(fit, a, rtol=rtol)
        oracles.assert_gauge(fit.value)
        assert oracles.true_error(a, fit.value) <= (rtol or 0.0) + 100 * oracles.eps(dtype)


@pytest.mark.parametrize("discarded", [1e-5, 1e-7, 1e-9, 1e-11, 1e-13])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_small_errors_are_known(discarded: float, dtype: type) -> None:
    """The discarded norm has no floor at the root of eps."""
    a = oracles.with_spectrum(np.concatenate([np.geomspace(1, 1e-4, 40), np.full(60, discarded)]), N, N, dtype)
    fit, _ = oracles.quietly(lambda: tnlib.svd(a, max_rank=40))
    oracles.assert_fit(fit, a)
    oracles.assert_gauge(fit.value)
    assert oracles.true_error(a, fit.value) == pytest.approx(
        discarded * np.sqrt(60) / np.linalg.norm(a), rel=2e-3, abs=1e-14
    )


@pytest.mark.parametrize("rtol", mostly_slow([0.5, 0.1, 1e-2, 1e-4], [0.1, 1e-4]))
@pytest.mark.parametrize("spectrum", ["1 / k", "exponential", "staircase", "flat with a step at 40"])
def test_a_tolerance_beside_the_cap(spectrum: str, rtol: float) -> None:
    a, s = with_spectrum(spectrum, N, 600), SPECTRA[spectrum](np.arange(N))
    fit, warned = oracles.quietly(lambda: tnlib.svd(a, max_rank=60, rtol=rtol))
    oracles.assert_fit(fit, a, rtol=rtol)
    oracles.assert_gauge(fit.value)
    oracles.assert_warned(fit, warned)
    tails = np.sqrt(np.cumsum(s[::-1] ** 2)[::-1]) / np.linalg.norm(s)
    needed = max(1, int(np.count_nonzero(tails > rtol)))
    assert fit.value.ranks[0] <= min(60, needed + 1), "one more, where the last value is not settled"
    assert fit.converged == (needed <= 60)


@oracles.each_dtype
def test_large_matrices_are_scale_free(dtype: np.dtype) -> None:
    a = with_spectrum("1 / k", N, N, dtype)
    want = tnlib.svd(a, max_rank=30)
    single = np.finfo(dtype).bits == 32
    for c in (1e-30, 1e-11, 1e11, 1e30) if single else (1e-200, 1e-150, 1e-118, 1e-30, 1e30, 1e118, 1e150, 1e200):
        scaled = dtype.type(c) * a
        fit = tnlib.svd(scaled, max_rank=30)
        oracles.assert_fit(fit, scaled)
        oracles.assert_gauge(fit.value)
        assert fit.error == pytest.approx(want.error, rel=1e-3)
        np.testing.assert_allclose(fit.value.s / dtype.type(c), want.value.s, rtol=2e-3)


@oracles.each_dtype
def test_large_zero_matrices(dtype: np.dtype) -> None:
    fit = tnlib.svd(np.zeros((N, N), dtype), max_rank=20)
    assert fit.value.ranks == (1,)
    assert fit.error == 0


@pytest.mark.parametrize("name", ["svd", "tt_svd", "tucker"])
@pytest.mark.parametrize("cap", [None, 20])
@oracles.each_dtype
def test_constant_matrices_have_rank_one(name: str, cap: int | None, dtype: np.dtype) -> None:
    """Of 300 equal rows or more the QR of LAPACK rounds in one direction, and its noise counts as rank."""
    a = np.ones((200, 220), dtype)
    fit = oracles.METHODS[name](a, None, cap)
    assert max(fit.value.ranks) == 1
    oracles.assert_fit(fit, a)
    oracles.assert_gauge(fit.value)


def test_sparse_and_graded_matrices() -> None:
    rng = np.random.default_rng(0)
    for a in (
        np.diag(0.9 ** np.arange(N)),
        np.eye(N),
        np.where(rng.random((N, N)) < 2e-3, rng.standard_normal((N, N)), 0.0),
        np.logspace(0, -30, N)[:, None] * rng.standard_normal((N, N)),
        np.kron(np.eye(N // 8), np.ones((8, 8))),
        rng.standard_normal((N, N)),
    ):
        fit, _ = oracles.quietly(lambda a=a: tnlib.svd(a, max_rank=30))
        s = np.linalg.svd(a, compute_uv=False)
        assert_leading(fit, a, s, fit.value.ranks[0])
        assert fit.value.ranks[0] == 30


def test_legs_of_a_tensor_can_be_the_rows_of_a_large_matrix() -> None:
    x = with_spectrum("1 / k", N, 600).reshape(8, 65, 20, 30).transpose(2, 0, 3, 1)
    assert converges(with_spectrum("1 / k", N, 600), 30)
    fit = tnlib.svd(x, left=(1, 3), max_rank=30)
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert fit.value.u.shape == (8, 65, 30)


def test_equal_values_at_the_cap_are_reported() -> None:
    for spectrum, cap, cut in (("flat with a step at 40", 20, True), ("flat with a step at 40", 40, False)):
        a = with_spectrum(spectrum, N, N)
        fit, warned = oracles.quietly(lambda a=a, cap=cap: tnlib.svd(a, max_rank=cap))
        assert bool(fit.notes) == cut
        oracles.assert_warned(fit, warned)


@oracles.each_dtype
def test_the_same_matrix_gives_the_same_bits_in_any_layout(dtype: np.dtype) -> None:
    a = with_spectrum("1 / k", N, 600, dtype)
    want = tnlib.svd(a, max_rank=20)
    for layout in ("Fortran", "negative strides", "read-only"):
        other = tnlib.svd(oracles.LAYOUTS[layout](a), max_rank=20)
        oracles.assert_same_bits(other.value, want.value)
        assert other.error == want.error


@pytest.mark.parametrize(("m", "n", "rank"), [(100, 5000, 3), (5000, 100, 3), (N, N, 200), (40, 40, 4)])
def test_small_sides_and_large_ranks(m: int, n: int, rank: int) -> None:
    a = oracles.with_spectrum(0.9 ** np.arange(min(m, n)), m, n)
    fit = tnlib.svd(a, max_rank=rank)
    oracles.assert_fit(fit, a)
    np.testing.assert_allclose(fit.value.s, 0.9 ** np.arange(rank), atol=1e-14)
