"""Left singular vectors and values from Gram matrices: exact ones, and those of one Gram matrix with its estimate."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import threadpoolctl
from format_cases import SPECTRA
from slow_cases import mostly_slow

import tnlib
from tnlib.linalg.gram import KERNEL_WORK
from tnlib.linalg.gram_svd import LeftSVD, leading_svd, left_svd

EPS = oracles.eps(np.float64)


def tails(s: np.ndarray) -> np.ndarray:
    return np.sqrt(np.append(np.cumsum(s[::-1] ** 2)[::-1], 0.0))


def singular_values(a: np.ndarray) -> np.ndarray:
    """Those of `a` (m, n), from triangles of short blocks: the QR of a long matrix rounds in one direction if all
    of its entries are equal, and is off by n eps.
    """
    blocks = [np.linalg.qr(a[:, k : k + 64].T, mode="r") for k in range(0, a.shape[1], 64)]
    while len(blocks) > 1:
        blocks = [np.linalg.qr(np.concatenate(blocks[k : k + 2]), mode="r") for k in range(0, len(blocks), 2)]
    return np.linalg.svd(blocks[0], compute_uv=False)


def assert_left(svd: LeftSVD, a: np.ndarray, *, factor: float) -> None:
    """`svd` holds left singular vectors and values of `a` (p, m, n) to `factor` eps of the norm, absolutely."""
    flat = oracles.wide(a).transpose(1, 0, 2).reshape(a.shape[1], -1)
    unit = factor * EPS * np.linalg.norm(flat)
    want = np.zeros(len(svd.s))
    true = singular_values(flat)
    want[: len(true)] = true
    assert len(svd.s) >= len(true)
    assert (np.diff(svd.s) <= 0).all()
    assert (svd.s >= 0).all()
    oracles.assert_isometric(svd.u)
    np.testing.assert_allclose(svd.s, want, rtol=0, atol=unit)
    rows = svd.u.conj().T @ flat
    products = rows @ rows.conj().T  # rows[i] of length s[i], orthogonal to each other
    lengths = svd.s + unit
    assert (np.abs(products - np.diag(svd.s**2)) <= 4 * unit * (lengths[:, None] + lengths)).all()
    for r in range(0, len(true), max(1, len(true) // 16)):
        lost = np.linalg.norm(flat - svd.u[:, :r] @ rows[:r])
        assert lost == pytest.approx(tails(want)[r], rel=1e-9, abs=4 * unit)


# (m, n) below the size from which kernels compute the Gram matrix, and above, where complex products are left to BLAS
SHORT = [(dtype, m, n) for dtype in ("float64", "complex128") for m, n in ((8, 1100), (40, 300), (200, 600))]
LONG = [("float64", 16, KERNEL_WORK // 256), ("float64", 40, KERNEL_WORK // 1600 + 1)]


@pytest.mark.parametrize(("dtype", "m", "n"), mostly_slow(SHORT + LONG, SHORT[:5]))
def test_exact_left_singular_vectors(dtype: str, m: int, n: int) -> None:
    for spectrum in SPECTRA:
        a = oracles.with_spectrum(SPECTRA[spectrum](m), m, n, dtype)[None]
        with oracles.unchanged(a), threadpoolctl.threadpool_limits(1 if n < 1 << 13 else 2):
            svd = left_svd(a, exact=True)
        assert svd.error_estimate == 0
        # LAPACK's divide and conquer takes values for equal that differ by less than 64 eps
        assert_left(svd, a, factor=160 if "clusters" in spectrum else 16)


def structured(m: int, n: int) -> dict[str, np.ndarray]:
    """Matrices whose rows lie in a space of few dimensions exactly, rounding errors and all."""
    rng = np.random.default_rng(0)
    half = np.zeros((m, n))
    half[: m // 2] = np.outer(rng.standard_normal(m // 2), rng.standard_normal(n))
    return {
        "ones": np.ones((m, n)),
        "zero but for half of the rows": half,
        "integers of rank one": np.outer(rng.integers(-5, 6, m), rng.integers(-5, 6, n)).astype(float),
        "integers of rank three": (rng.integers(-5, 6, (m, 3)) @ rng.integers(-5, 6, (3, n))).astype(float),
        "equal rows": np.repeat(rng.standard_normal((2, n)), -(-m // 2), axis=0)[:m],
        "equal columns": np.repeat(rng.standard_normal((m, 2)), n // 2, axis=1),
        "sums": np.add.outer(np.arange(m), np.arange(n)) + 0.0,
        "few columns": np.where(np.arange(n) < 3, rng.standard_normal((m, n)), 0.0),
        "diagonal": np.eye(m, n),
        "one entry": np.eye(m, n) * (np.arange(n) == 1),
    }


@pytest.mark.parametrize(("m", "n"), [(4, 4096), (16, 1024), (100, 300)])
def test_exact_left_singular_vectors_of_exactly_low_rank(m: int, n: int) -> None:
    """The directions of singular value zero hold rounding errors, which may be parallel to large rows."""
    for a in structured(m, n).values():
        assert_left(left_svd(a[None], exact=True), a[None], factor=32)


@oracles.each_dtype
def test_left_singular_vectors_of_slabs(dtype: np.dtype) -> None:
    for shape in ((1, 3, 2), (1, 1, 9000), (9000, 1, 1), (30, 4, 70), (700, 6, 3), (5, 40, 60)):
        a = oracles.normal(shape, dtype)
        flat = oracles.wide(a).transpose(1, 0, 2).reshape(shape[1], -1)
        want = np.linalg.svd(flat, compute_uv=False)
        for exact in (False, True):
            with oracles.unchanged(a):
                svd = left_svd(a, exact=exact)
            if svd.u.dtype in (np.float64, np.complex128):
                limit = 0 if exact else svd.error_estimate
                np.testing.assert_allclose(svd.s[: min(flat.shape)], want, rtol=1e-9, atol=limit)
            oracles.assert_isometric(svd.u)


ESTIMATED = [
    *((dtype, m, n) for dtype in map(str, oracles.DTYPES) for m, n in ((3, 4), (40, 300))),
    ("float64", 200, 600),
    *((dtype, 40, KERNEL_WORK // 1600 + 1) for dtype in ("float32", "float64")),
]


@pytest.mark.parametrize(("dtype", "m", "n"), mostly_slow(ESTIMATED, ESTIMATED[:-2:2]))
def test_tails_from_one_gram_matrix_are_right_to_their_error_estimate(dtype: str, m: int, n: int) -> None:
    for spectrum in SPECTRA:
        a = oracles.with_spectrum(SPECTRA[spectrum](m), m, n, dtype)
        with threadpoolctl.threadpool_limits(1 if n < 1 << 13 else 2):
            svd = left_svd(a[None], exact=False)
        assert 0 < svd.error_estimate < 1e-5 * oracles.norm(a)
        oracles.assert_isometric(svd.u)
        true = tails(np.linalg.svd(oracles.wide(a), compute_uv=False))
        assert (np.abs(tails(svd.s) ** 2 - true**2) <= svd.error_estimate**2).all()
        for r in range(0, m, max(1, m // 8)):  # the error of the vectors, not that of the values alone
            left = svd.u[:, :r]
            discarded = oracles.norm(oracles.wide(a) - left @ (left.conj().T @ oracles.wide(a)))
            assert abs(discarded**2 - tails(svd.s)[r] ** 2) <= svd.error_estimate**2


def test_the_error_estimate_of_zero_is_zero() -> None:
    for exact in (False, True):
        svd = left_svd(np.zeros((1, 4, 3000)), exact=exact)
        oracles.assert_isometric(svd.u)
        assert not svd.s.any()
        assert svd.error_estimate == 0


LEADING = {
    "1 / k": lambda k: 1 / (1.0 + k),
    "exponential": lambda k: np.exp(-k / 4),
    "flat": lambda k: np.ones(len(k)),
    "step at 16": lambda k: np.where(k < 16, 1.0, 1e-3),
    "step below resolution": lambda k: np.where(k < 16, 1.0, 1e-9),
}


@oracles.each_dtype
@pytest.mark.parametrize("shape", [(130, 100), (64, 400), (2000, 90)], ids=str)
@pytest.mark.parametrize("spectrum", LEADING)
def test_leading_singular_vectors(spectrum: str, shape: tuple[int, int], dtype: np.dtype) -> None:
    """Those of LAPACK in `svd`, by whichever way: errors are the smallest ones at the rank, and known."""
    rank, eps = 16, oracles.eps(dtype)
    a = oracles.with_spectrum(LEADING[spectrum](np.arange(min(shape))), *shape, dtype)
    s = np.linalg.svd(oracles.wide(a), compute_uv=False)
    fit, _ = oracles.quietly(lambda: tnlib.svd(a, max_rank=rank))
    oracles.assert_fit(fit, a)
    oracles.assert_gauge(fit.value)
    kept = fit.value.ranks[0]
    assert kept == min(rank, int(np.count_nonzero(s > 32 * eps * np.linalg.norm(s))))
    best = np.linalg.norm(s[kept:]) / np.linalg.norm(s)
    assert best - 64 * eps <= oracles.true_error(a, fit.value) <= best * (1 + 1e-4) + 64 * eps
    np.testing.assert_allclose(fit.value.s, s[:kept], rtol=0, atol=64 * eps * s[0])
    assert bool(fit.notes) == (spectrum == "flat"), "equal values on both sides of the cut"


def test_leading_vectors_are_left_to_lapack() -> None:
    """Where the discarded part is below the resolution of a Gram matrix, and where LAPACK is faster."""
    long = oracles.with_spectrum(LEADING["1 / k"](np.arange(64)), 64, 400)
    for a, rank, admitted in (
        (long, 15, True),
        (long, 16, False),
        (long[:60], 4, False),
        (oracles.with_spectrum(LEADING["step below resolution"](np.arange(80)), 100, 80), 16, False),
        (oracles.with_spectrum(LEADING["1 / k"](np.arange(80)), 100, 80, np.complex128), 16, False),
    ):
        leading = leading_svd(a, rank, norm=oracles.norm(a), negligible=1e-15)
        assert (leading is not None) == admitted
