"""The thin singular value decomposition of one matrix."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.jacobi import jacobi_svd
from tnlib.linalg.threads import blas_threads

_THREADED = 256  # smaller side from which threads of LAPACK pay


def thin_svd(a: Array) -> tuple[Array, Array, Array]:
    """Return u (m, k), s (k,), vh (k, n) with k = min(m, n): LAPACK's gesdd, else gesvd, else Jacobi rotations.

    Divide and conquer (gesdd) is the fastest driver and, on rare clustered spectra, does not converge; the QR
    iteration (gesvd) is slower and nearly always does.
    """
    # numpy's LAPACK, as for every other factorisation and product: scipy brings threads of its own, and where
    # calls to both alternate, the idle threads of one spin in the way of the other.
    wide = a.shape[0] < a.shape[1]
    tall = a.T if wide else a  # of a long matrix the QR sums along its columns, which rounds less than an LQ along rows
    with blas_threads() if min(a.shape) >= _THREADED else nullcontext():
        u, s, vh = _first_that_converges(tall)
    return (vh.T, s, u.T) if wide else (u, s, vh)


def _first_that_converges(a: Array) -> tuple[Array, Array, Array]:
    try:
        u, s, vh = np.linalg.svd(a, full_matrices=False)
    except np.linalg.LinAlgError:
        import scipy.linalg

        try:
            u, s, vh = scipy.linalg.svd(a, full_matrices=False, check_finite=False, lapack_driver="gesvd")
        except np.linalg.LinAlgError:
            return jacobi_svd(a)
    return u, s, vh
