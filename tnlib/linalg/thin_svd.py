"""Thin singular value decompositions, of a matrix and of a product of two factors."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.threads import all_blas_threads

_THREADED = 256  # smaller side from which threads of LAPACK pay


def thin_svd(a: Array) -> tuple[Array, Array, Array]:
    """Return u (m, k), s (k,), vh (k, n) of `a` (m, n), k = min(m, n), by LAPACK's gesdd, or gesvd where that fails.

    Divide and conquer (gesdd) is the fastest driver; on rare clustered spectra it does not converge, where the QR
    iteration (gesvd) does.
    """
    # numpy's LAPACK, as for every other factorization and product: scipy brings threads of its own, and where
    # calls to both alternate, the idle threads of one spin in the way of the other.
    wide = a.shape[0] < a.shape[1]
    tall = a.T if wide else a  # the QR of a tall matrix sums along columns, and rounds less than the LQ of a wide one
    with nullcontext() if tall.shape[1] < _THREADED else all_blas_threads():
        try:
            u, s, vh = np.linalg.svd(tall, full_matrices=False)
        except np.linalg.LinAlgError:
            import scipy.linalg

            u, s, vh = scipy.linalg.svd(tall, full_matrices=False, check_finite=False, lapack_driver="gesvd")
    return (vh.T, s, u.T) if wide else (u, s, vh)


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
