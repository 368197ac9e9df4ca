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

dtypes = oracles.each_dtype


@dtypes
def test_qr(dtype: np.dtype) -> None:
    for shape in ((6, 4), (4, 6), (5, 5), (1, 3), (3, 1)):
        for a in (oracles.normal(shape, dtype), np.zeros(shape, dtype)):
            with oracles.unchanged(a):
                q, r = qr_positive(a)
                t = r_factor(a)
            oracles.assert_isometric(q)
            oracles.assert_close(q @ r, a, dtype)
            np.testing.assert_array_equal(np.tril(r, -1), 0)
            np.testing.assert_allclose(np.diagonal(r).imag, 0, atol=8 * oracles.eps(dtype))
            assert (np.diagonal(r).real >= 0).all()
            oracles.assert_close(t.conj().T @ t, a.conj().T @ a, dtype, 200)


@dtypes
@pytest.mark.parametrize(("m", "n"), [(3, 5), (20, 250), (40, 110), (12, 6), (64, 2048)])
def test_bases_of_rows(dtype: np.dtype, m: int, n: int) -> None:
    """Of any spectrum, and at any size of entries within a sweep: trains let them grow to 2 ** 64 before rescaling."""
    for spectrum in SPECTRA:
        a = oracles.with_spectrum(SPECTRA[spectrum](min(m, n)), m, n, dtype)
        for size in (2.0**-60, 2.0**-30, 1.0, 2.0**30, 2.0**60, 0.0) if (m, n) == (20, 250) else (1.0, 0.0):
            scaled = dtype.type(size) * a
            with oracles.unchanged(scaled):
                l, q = orthonormal_rows(scaled)
            assert l.dtype == q.dtype == dtype
            assert l.shape == (m, len(q))
            assert len(q) <= min(m, n)
            oracles.assert_isometric(q.conj().T)
            oracles.assert_close(l @ q, scaled, dtype, factor=8 * np.sqrt(m) + 8)


@pytest.mark.parametrize(
    ("shape", "dtype", "by_gram"),
    [((32, 512), float, False), ((64, 1024), float, False), ((64, 2048), float, True), ((64, 2048), complex, False)],
)
def test_short_or_complex_matrices_are_factorized_by_qr(shape: tuple[int, int], dtype: type, by_gram: bool) -> None:
    a = oracles.normal(shape, dtype)
    _, q = orthonormal_rows(a)
    assert np.array_equal(q, np.linalg.qr(a.conj().T)[0].conj().T) is not by_gram


@dtypes
def test_left_factors_have_the_gram_matrix_and_at_most_the_rank(dtype: np.dtype) -> None:
    for m, n, rank in ((6, 20, 6), (6, 20, 3), (20, 6, 6), (20, 6, 2), (7, 7, 4)):
        a = oracles.with_spectrum(np.linspace(1, 0.1, rank), m, n, dtype)
        with oracles.unchanged(a):
            left = left_factor(a)
        assert left.dtype == dtype
        oracles.assert_close(left @ left.conj().T, a @ a.conj().T, dtype, 200)
        repeated = np.concatenate([a[:2], a[:2], a[:2]])
        assert left_factor(repeated).shape[1] == min(2, rank)


@dtypes
def test_isometries_and_completed_columns(dtype: np.dtype) -> None:
    for n, r, rank in ((6, 2, 5), (6, 6, 6), (4, 1, 1), (5, 2, 2)):
        u = oracles.isometry(n, r, dtype).astype(dtype)
        q = complete_columns(u, rank)
        assert (q.shape, q.dtype) == ((n, rank), dtype)
        oracles.assert_isometric(q)
        oracles.assert_signs(q)
        oracles.assert_close(q[:, :r] @ q[:, :r].conj().T, u @ u.conj().T, dtype)
    q = oracles.isometry(30, 7, dtype).astype(dtype)
    for same in (q, q * (1 + 100 * oracles.eps(dtype))):
        assert is_isometry(same)
    assert isometry_error(q) <= 100 * oracles.eps(dtype)
    assert isometry_error(2 * q) == pytest.approx(3 * np.sqrt(7), rel=1e-5)
    assert isometry_error(q.T) == pytest.approx(np.sqrt(23), rel=1e-5)
    for other in (2 * q, q.T, q * dtype.type(1 + 1e5 * oracles.eps(dtype))):
        assert not is_isometry(other)


@pytest.mark.parametrize("size", [1e200, 1e308])
def test_no_isometry_has_overflowing_squares(size: float) -> None:
    for a in (np.full((2, 2), size), np.array([[size, size], [size, -size]]), np.full((2, 2), size * 1j)):
        assert isometry_error(a) == np.inf
        assert not is_isometry(a)
    assert isometry_error(np.zeros((3, 4))) == 2
