"""Thin singular value decompositions: of a matrix, truncated within a budget, and of a product of two factors."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tnlib._array_api import AnyArray, namespace, records_gradient, to_host
from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.orthogonal import orthonormal_rows, qr_positive, r_factor
from tnlib.linalg.scaling import norm, shift
from tnlib.linalg.threads import all_blas_threads
from tnlib.linalg.truncation import TruncationBudget

_THREADED = 256  # smaller side from which threads of LAPACK pay
_TALL = 32  # rows per column up to which LAPACK is as fast as a factorization before it
_EQUAL = 8  # eps, of the largest singular value


def thin_svd(a: Array) -> tuple[Array, Array, Array]:
    """Return u (m, k), s (k,), vh (k, n) of `a` (m, n), k = min(m, n), by LAPACK's gesdd, or gesvd where that fails.

    Divide and conquer (gesdd) is the fastest driver; on rare clustered spectra it does not converge, where the QR
    iteration (gesvd) does. Arrays of other libraries than numpy are decomposed by their own SVD.
    """
    if not isinstance(a, np.ndarray):
        return _svd_of_other(a)
    # numpy's LAPACK, as for every other factorization and product: scipy brings threads of its own, and where
    # calls to both alternate, the idle threads of one spin in the way of the other.
    m, n = a.shape
    wide = m < n
    tall = a.T if wide else a  # the QR of a tall matrix sums along columns, and rounds less than the LQ of a wide one
    try:
        if m < _THREADED or n < _THREADED:
            u, s, vh = np.linalg.svd(tall, full_matrices=False)
        else:
            with all_blas_threads():
                u, s, vh = np.linalg.svd(tall, full_matrices=False)
    except np.linalg.LinAlgError:
        import scipy.linalg

        u, s, vh = scipy.linalg.svd(tall, full_matrices=False, check_finite=False, lapack_driver="gesvd")
    return (vh.T, s, u.T) if wide else (u, s, vh)


def singular_values(a: Array) -> Array:
    """Return the singular values (min(m, n),) of `a` (m, n), descending; of tall matrices by their QR."""
    tall = a.T if a.shape[0] < a.shape[1] else a
    try:
        return np.linalg.svd(r_factor(tall) if len(tall) > 2 * tall.shape[1] else tall, compute_uv=False)
    except np.linalg.LinAlgError:
        return thin_svd(tall)[1]


def _svd_of_other(a: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    # The gradient of an SVD of complex matrices in torch 2.13 multiplies rounding errors by the squares of singular
    # values; of values up to 1 nothing is lost.
    e = math.frexp(norm(a))[1]
    u, s, vh = namespace(a).linalg.svd(shift(a, -e), full_matrices=False)
    if records_gradient(a):
        _refuse_equal(to_host(s))
    return u, shift(s, e), vh


def _refuse_equal(values: Array) -> None:
    """Raise where singular values are equal or zero to roundoff: the gradient of the SVD in torch is NaN."""
    gaps = np.abs(np.diff(values, append=0))
    if len(values) > 1 and gaps.min() <= _EQUAL * np.finfo(values.dtype).eps * values[0]:
        raise ArgumentError(
            "round and apply: the singular values of a value with a gradient must be distinct and positive, got equal "
            "ones or a zero; round it under torch.no_grad() first."
        )


class LeftSingularVectors(NamedTuple):
    """Left singular vectors in canonical bases, singular values, and the projection on the vectors."""

    u: Array  # (m, r) isometric
    s: Array  # (r,), on the host
    rest: Array  # u^H a, (r, n)


def truncated_svd(a: Array, budget: TruncationBudget, *, diagonal: bool = False) -> LeftSingularVectors:
    """Return the leading singular vectors of `a` (m, n), of numpy or another library, at the rank of the budget.

    With `diagonal` the singular values will stay on a diagonal between the bases (`equality_tolerance`).
    """
    u, s, vh = _svd_of_tall(a)
    values = to_host(s)
    rank = budget.truncate(values)
    u, values = u[:, :rank], values[:rank]
    change = canonical_basis_change(u, values, budget.dtype, diagonal=diagonal)
    return LeftSingularVectors(change.columns(u), values, change.rows(s[:rank, None] * vh[:rank, :]))


def _svd_of_tall(a: Array) -> tuple[Array, Array, Array]:
    """Return the thin SVD of `a` by that of a square factor, where it is tall."""
    if a.shape[0] < _TALL * a.shape[1] or not isinstance(a, np.ndarray):
        return thin_svd(a)
    factor, rows = orthonormal_rows(np.ascontiguousarray(a.T))  # a = rows^T factor^T
    u, s, vh = thin_svd(factor.T)
    return rows.T @ u, s, vh


def product_svd(left: Array, right: Array) -> tuple[Array, Array, Array]:
    """Return u (m, k), s (k,), vh (k, n) of left (m, r) @ right (r, n), k <= r, at a cost linear in m and n.

    With left = Q1 R1 and right^T = Q2 R2, the product is Q1 (R1 R2^T) Q2^T, and the matrix between the isometries
    is only r x r. Signs, and bases of equal values, are fixed on the left.
    """
    q1, r1 = qr_positive(left)
    q2, r2 = qr_positive(right.T)
    u, s, vh = thin_svd(r1 @ r2.T)
    u, vh = q1 @ u, vh @ q2.T
    relative = s / (s[0] or 1)  # so that squares stay in range
    change = canonical_basis_change(u, relative, u.dtype, diagonal=True)
    return change.columns(u), s, change.rows(vh)
