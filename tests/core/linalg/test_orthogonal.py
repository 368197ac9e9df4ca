"""Orthogonal factorizations: QR with positive diagonal, orthonormal rows and columns, isometries."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from format_cases import SPECTRA

from tnlib.linalg.orthogonal import (
    complete_columns,
    is_isometry,
    isometry_error,
    left_factor,
    orthonormal_rows,
    qr_positive,
    r_factor,
)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 3), (3, 1)], ids=str)
def test_qr(dtype: np.dtype, shape: tuple[int, int]) -> None:
    a = oracles.normal(shape, dtype)
    with oracles.unchanged(a):
        q, r = qr_positive(a)
        t = r_factor(a)
    oracles.assert_isometric(q)
    oracles.assert_close(q @ r, a, dtype)
    np.testing.assert_array_equal(np.tril(r, -1), 0)
    np.testing.assert_allclose(np.diagonal(r).imag, 0, atol=8 * oracles.eps(dtype))
    assert (np.diagonal(r).real >= 0).all()
    oracles.assert_close(t.conj().T @ t, a.conj().T @ a, dtype, 200)
    q, r = qr_positive(np.zeros(shape, dtype))
    oracles.assert_isometric(q)
    assert not r.any()


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(3, 5), (20, 250), (40, 110), (12, 6), (64, 2048)])
def test_bases_of_rows(spectrum: str, dtype: np.dtype, m: int, n: int) -> None:
    a = oracles.with_spectrum(SPECTRA[spectrum](min(m, n)), m, n, dtype)
    with oracles.unchanged(a):
        l, q = orthonormal_rows(a)
    assert l.dtype == q.dtype == dtype
    assert l.shape == (m, len(q))
    assert len(q) <= min(m, n)
    oracles.assert_isometric(q.conj().T)
    oracles.assert_close(l @ q, a, dtype, factor=8 * np.sqrt(m) + 8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [2.0**-60, 2.0**-30, 1.0, 2.0**30, 2.0**60])
@pytest.mark.parametrize("spectrum", ["geometric to 1e-16", "cut at 1e-7", "flat"])
def test_bases_of_rows_at_any_size_within_a_sweep(dtype: type, size: float, spectrum: str) -> None:
    """Sweeps over trains let entries grow to 2 ** 64 before they rescale."""
    a = (size * oracles.with_spectrum(SPECTRA[spectrum](20), 20, 250)).astype(dtype)
    l, q = orthonormal_rows(a)
    oracles.assert_isometric(q.conj().T)
    oracles.assert_close(l @ q, a, dtype)


def test_bases_of_zero_rows() -> None:
    for shape in ((3, 5), (20, 250)):
        l, q = orthonormal_rows(np.zeros(shape))
        oracles.assert_isometric(q.T)
        assert not l.any()


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "rank"), [(6, 20, 6), (6, 20, 3), (20, 6, 6), (20, 6, 2), (7, 7, 4)])
def test_left_factors_have_the_gram_matrix_and_at_most_the_rank(dtype: np.dtype, m: int, n: int, rank: int) -> None:
    a = oracles.with_spectrum(np.linspace(1, 0.1, rank), m, n, dtype)
    with oracles.unchanged(a):
        left = left_factor(a)
    assert left.dtype == dtype
    oracles.assert_close(left @ left.conj().T, a @ a.conj().T, dtype, 200)
    repeated = np.concatenate([a[:2], a[:2], a[:2]])
    assert left_factor(repeated).shape[1] == min(2, rank)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("n", "r", "rank"), [(6, 2, 5), (6, 6, 6), (4, 1, 1), (5, 2, 2)])
def test_completed_columns(dtype: np.dtype, n: int, r: int, rank: int) -> None:
    u = oracles.isometry(n, r, dtype).astype(dtype)
    with oracles.unchanged(u):
        q = complete_columns(u, rank)
    assert q.shape == (n, rank)
    assert q.dtype == dtype
    oracles.assert_isometric(q)
    oracles.assert_signs(q)
    oracles.assert_close(q[:, :r] @ q[:, :r].conj().T, u @ u.conj().T, dtype)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_isometries(dtype: np.dtype) -> None:
    q = oracles.isometry(30, 7, dtype).astype(dtype)
    assert is_isometry(q)
    assert isometry_error(q) <= 100 * oracles.eps(dtype)
    assert not is_isometry(2 * q)
    assert isometry_error(2 * q) == pytest.approx(3 * np.sqrt(7), rel=1e-5)
    assert not is_isometry(q.T)
    assert isometry_error(q.T) == pytest.approx(np.sqrt(23), rel=1e-5)
    assert is_isometry(q * (1 + 100 * oracles.eps(dtype)))
    assert not is_isometry(q * dtype.type(1 + 1e5 * oracles.eps(dtype)))


@pytest.mark.parametrize("size", [1e200, 1e308])
def test_no_isometry_has_overflowing_squares(size: float) -> None:
    for a in (np.full((2, 2), size), np.array([[size, size], [size, -size]]), np.full((2, 2), size * 1j)):
        assert isometry_error(a) == np.inf
        assert not is_isometry(a)
    assert isometry_error(np.zeros((3, 4))) == 2
