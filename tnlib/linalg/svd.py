"""Thin and truncated singular value decompositions of one matrix, with fixed signs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.jacobi import jacobi_svd
from tnlib.linalg.rank import choose_rank, cuts_group, tails
from tnlib.linalg.signs import leading_phases
from tnlib.linalg.threads import blas_threads

_THREADED = 256  # smaller side from which threads of LAPACK pay


class Truncated(NamedTuple):
    """What a truncated SVD keeps, and what it knows of the rest."""

    u: Array  # (m, r), isometric
    s: Array  # (r,), descending, float
    vh: Array  # (r, n), isometric rows
    discarded: float  # Frobenius norm of what was dropped
    cuts_group: bool  # the rank cap separates equal values


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


def truncated_svd(a: Array, *, budget: float | None, noise: float, max_rank: int | None = None) -> Truncated:
    """Truncate `a` to the smallest rank within `budget` (see `choose_rank`); signs are fixed on the left."""
    u, s, vh = thin_svd(a)
    rank = choose_rank(s, budget=budget, noise=noise, max_rank=max_rank)
    capped = rank < choose_rank(s, budget=budget, noise=noise)
    phases = leading_phases(u[:, :rank])
    return Truncated(
        u[:, :rank] * phases.conj(),  # m r
        s[:rank],
        phases[:, None] * vh[:rank],  # r n
        float(tails(s)[rank]),
        capped and cuts_group(s, rank, noise),
    )
