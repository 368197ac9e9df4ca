"""Left singular vectors and singular values of long matrices, and leading ones of any, from Gram matrices."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tnlib._array_api import permute, reshape, to_host
from tnlib._typing import Array
from tnlib.linalg.gram import gram, project
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.threads import all_blas_threads, parallel_matmul

_SHORT = 1 << 13  # entries; a decomposition of fewer costs no more than a Gram matrix
_BLOCK = 1 << 21  # entries that are rotated at a time
# Shorter side, ratio of the sides of complex matrices, and part of the shorter side up to which the rank may be, where
# leading vectors by a Gram matrix take 0.1 to 0.7 of the time of gesdd.
_LEAST_SIDE, _COMPLEX_RATIO, _PART = 64, 2, 4
_RESOLVED = 100  # times the error estimate: such a discarded norm exceeds the smallest one by less than 1 / 20,000


class LeftSVD(NamedTuple):
    """Left singular vectors and singular values, all that a truncation from the left needs: A A^H = u diag(s^2) u^H."""

    u: Array  # (m, k), orthonormal columns
    s: Array  # (k,), descending
    error_estimate: float  # of the norms of tails of s: the squares of these are right to error_estimate^2


class LeadingSVD(NamedTuple):
    """Leading singular vectors, a few more singular values, and the norm of the part outside of their spaces."""

    u: Array  # (m, rank)
    s: Array  # (l,), l > rank; the last ones are less accurate
    vh: Array  # (rank, n)
    residual: float
    resolution: float = 0.0  # relative difference of values that may be equal, where it is above roundoff


def leading_svd(a: Array, rank: int, *, norm: float, negligible: float) -> LeadingSVD | None:
    """Return the leading `rank` singular vectors of `a` (m, n), or None where LAPACK is faster or more accurate.

    They are those of the projection of `a` on the `rank` + 1 leading eigenvectors of the Gram matrix of its shorter
    side. Rounding errors of the Gram matrix raise the square of the discarded norm by the square of the error estimate
    at most; None where that matters. `norm` is the Frobenius norm of `a`; errors up to `negligible` count as roundoff.
    """
    m, n = a.shape
    short, count = min(m, n), rank + 1
    too_square = a.dtype.kind == "c" and max(m, n) < _COMPLEX_RATIO * short
    if short < _LEAST_SIDE or count * _PART > short or too_square:
        return None
    wide = np.ascontiguousarray(a if m <= n else a.T)
    with all_blas_threads():
        left = left_svd(wide[None], exact=False)
    basis = left.u[:, :count]
    small, residual = project(basis, wide, size=norm, negligible=negligible)  # l n
    if negligible < residual < _RESOLVED * left.error_estimate:
        return None
    u, s, vh = thin_svd(small)
    u, vh = parallel_matmul(basis, u[:, :rank]), vh[:rank]
    return LeadingSVD(u, s, vh, residual) if m <= n else LeadingSVD(vh.T, s, u.T, residual)


def left_svd(a: Array, *, exact: bool) -> LeftSVD:
    r"""Return left singular vectors and values of the unfolding of `a` (p, m, n) with rows m.

    They are determined by A A^H, the Gram matrix G of size m. Its eigenvalues are the squares, so singular values below
    sqrt(eps) of the largest are lost in rounding: tails have an error of at most sqrt(4 m eps) of the norm. With
    `exact` there is a second Gram matrix, in the eigenbasis Q of the first one,

        G = Q L Q^H,    H = (Q^H A) (Q^H A)^H = D C D,    C = Z M Z^H,    A A^H = X X^H  with  X = Q D Z sqrt(M),

    where D holds the lengths of the rows of Q^H A. These rows are nearly orthogonal, and large and small ones are
    separate, so that every entry of H is right to eps times the lengths of its two rows. Scaled to a unit diagonal it
    loses nothing more, and the singular values of X are as accurate as those of a QR or an SVD of A. All the work that
    grows with n is done by two Gram matrices and one product. Arrays of other libraries than numpy are decomposed by
    their own SVD.
    """
    slabs, m, n = a.shape
    if not isinstance(a, np.ndarray):
        u, values, _ = thin_svd(reshape(permute(a, (1, 0, 2)), (m, slabs * n)))
        return LeftSVD(u, to_host(values), 0.0)
    if m > slabs * n or (exact and (a.size < _SHORT or 2 * m > slabs * n)):
        flat = a.reshape(m, -1) if slabs == 1 else a.transpose(1, 0, 2).reshape(m, -1)  # m (p n)
        u, s, _ = thin_svd(flat)
        return LeftSVD(u, s, 0.0)
    total = gram(a)
    if not exact:
        return svd_of_gram(total)
    _, vectors = np.linalg.eigh(total)
    return LeftSVD(*_decompose_in_basis(a, vectors), 0.0)


def svd_of_gram(total: Array) -> LeftSVD:
    """Return left singular vectors and values of A from its Gram matrix A A^H (m, m) in double precision."""
    values, vectors = np.linalg.eigh(total)
    s = np.sqrt(np.maximum(values[::-1], 0.0))
    error_estimate = gram_resolution(len(s)) * math.sqrt(s @ s)
    return LeftSVD(vectors[:, ::-1], s, error_estimate)


def gram_resolution(m: int) -> float:
    """Return the error of tails of singular values from a Gram matrix of size `m`, relative to the norm."""
    return math.sqrt(4 * m * np.finfo(np.float64).eps)


def _decompose_in_basis(a: Array, basis: Array) -> tuple[Array, Array]:
    """Return left singular vectors and values of `a` (p, m, n) by a Gram matrix in an orthonormal basis (m, m)."""
    slabs, m, n = a.shape
    adjoint = np.ascontiguousarray(basis.conj().T)
    total = np.zeros_like(basis)
    columns, block_slabs = max(1, _BLOCK // m), max(1, _BLOCK // (m * n))
    for p in range(0, slabs, block_slabs):
        for k in range(0, n, columns):
            block = a[p : p + block_slabs, :, k : k + columns].transpose(1, 0, 2).reshape(m, -1)  # m (p n)
            total += gram((adjoint @ block)[None])  # m [m] (p n)
    return _basis_of_gram(total, basis)


def _basis_of_gram(total: Array, basis: Array) -> tuple[Array, Array]:
    """Return left singular vectors and values from the Gram matrix `total` in a basis where it is nearly diagonal."""
    m = len(total)
    lengths = np.sqrt(np.maximum(np.diagonal(total).real, 0.0))
    # Rows that the first Gram matrix does not resolve may be parallel. They are scaled to a block of norm 1 or less, so
    # that the norm of C, and with it the rounding of its large rows, does not grow with their number.
    faint = lengths <= math.sqrt(m * np.finfo(np.float64).eps * (lengths @ lengths))
    lengths[faint] *= math.sqrt(np.count_nonzero(faint))
    units = np.where(lengths > 0, lengths, 1.0)
    values, vectors = np.linalg.eigh(total / np.multiply.outer(units, units))
    root = lengths[:, None] * vectors * np.sqrt(np.maximum(values, 0.0))
    u, s, _ = thin_svd(basis @ root)
    # Where values cluster, divide and conquer leaves columns orthogonal to a thousand eps only; so one Newton step.
    return u @ (1.5 * np.eye(m) - 0.5 * (u.conj().T @ u)), s
