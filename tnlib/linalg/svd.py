"""Thin and truncated singular value decompositions of one matrix, with fixed signs."""

from __future__ import annotations

from typing import NamedTuple

import scipy.linalg

from tnlib._typing import Array
from tnlib.linalg.rank import choose_rank, cuts_group, tails
from tnlib.linalg.signs import leading_phases


class Truncated(NamedTuple):
    """What a truncated SVD keeps, and what it knows of the rest."""

    u: Array  # (m, r), isometric
    s: Array  # (r,), descending, float
    vh: Array  # (r, n), isometric rows
    discarded: float  # Frobenius norm of what was dropped
    cuts_group: bool  # the rank cap separates equal values


def thin_svd(a: Array) -> tuple[Array, Array, Array]:
    """Return u (m, k), s (k,), vh (k, n) with k = min(m, n): LAPACK's gesdd, and gesvd where that fails.

    Divide and conquer (gesdd) is the fastest driver and, on rare clustered spectra, does not converge; the QR
    iteration (gesvd) is slower and does.
    """
    # The transpose of a C-ordered matrix is Fortran-ordered, which LAPACK takes without another copy.
    swap = a.flags.c_contiguous and not a.flags.f_contiguous
    m = a.T if swap else a
    try:
        u, s, vh = scipy.linalg.svd(m, full_matrices=False, check_finite=False, lapack_driver="gesdd")
    except scipy.linalg.LinAlgError:
        u, s, vh = scipy.linalg.svd(m, full_matrices=False, check_finite=False, lapack_driver="gesvd")
    return (vh.T, s, u.T) if swap else (u, s, vh)


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
