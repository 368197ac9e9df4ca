"""The leading singular values and vectors of a large matrix by subspace iteration from random vectors."""

from __future__ import annotations

import math

import numpy as np

from tnlib._typing import Array
from tnlib.linalg import threads
from tnlib.linalg.left import left_svd
from tnlib.linalg.project import project

_SMALLEST_SIDE = 512  # of a matrix for which an iteration is worth its products
_PART = 5  # of the smaller side: more vectors than this part of it, and LAPACK is as fast
_SETTLED = 2e-4  # relative change of the error by a step
_FIRST_CHECK = 2
_STEPS = 8
_FAINT = 1e-5  # relative: smaller singular values are not to be had from a Gram matrix


def leading_svd(a: Array, rank: int, *, norm: float, negligible: float) -> tuple[Array, Array, Array, float] | None:
    """Return u (m, l), s (l,), vh (l, n) with l > rank, and norm(a - u diag(s) vh); None where LAPACK is to be asked.

    Subspace iteration (Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review 53 (2011),
    algorithm 4.4) with a few vectors more than `rank`, until the error at `rank` stands still to a part in five
    thousand. How many steps that takes depends on how slowly the spectrum decays; what is returned does not: the
    norm of what lies outside the space found is known, not estimated.

    Parameters
    ----------
    a
        (m, n).
    rank
        How many singular values are wanted; the last of the l returned are less accurate.
    norm
        Frobenius norm of `a`.
    negligible
        Error that counts as roundoff.
    """
    m, n = a.shape
    count = rank + max(16, rank // 2)
    if min(m, n) < _SMALLEST_SIDE or count * _PART > min(m, n):
        return None
    rng = np.random.default_rng(0)  # the same input gives the same output
    y = threads.matmul(a, rng.standard_normal((n, count)).astype(a.real.dtype))
    adjoint = np.ascontiguousarray(a.conj().T) if np.iscomplexobj(a) else a.T
    previous = math.inf
    for step in range(1, _STEPS + 1):
        x = _orthonormal(threads.matmul(adjoint, y), passes=1).astype(a.dtype, copy=False)
        y = threads.matmul(a, x)
        if step < _FIRST_CHECK:
            continue
        # No space of this size inside that of x holds more than the leading singular values of y.
        held = float(np.linalg.eigvalsh(_gram(y))[::-1][:rank].sum())
        error = math.sqrt(max(0.0, norm**2 - held))
        if error <= negligible or previous - error <= _SETTLED * error:
            break
        previous = error
    else:
        return None
    q = _orthonormal(y, passes=2)
    small, lost = project(q, a, size=norm, negligible=negligible)  # l n
    left = left_svd(small[None], exact=False)
    if left.s[rank - 1] < _FAINT * left.s[0]:
        return None
    keep = int(np.count_nonzero(left.s >= _FAINT * left.s[0]))
    u, s = left.u[:, :keep], left.s[:keep]
    vh = threads.matmul(np.ascontiguousarray((u / s).conj().T), small)
    lost = math.hypot(lost, float(np.linalg.norm(left.s[keep:])))
    return threads.matmul(q, np.ascontiguousarray(u)), s, _orthonormal(vh.conj().T, passes=1).conj().T, lost


def _gram(y: Array) -> Array:
    wide = y.astype(np.result_type(y, np.float64), copy=False)
    return threads.matmul(wide.conj().T, wide)


def _orthonormal(y: Array, *, passes: int) -> Array:
    """Return columns that span those of `y`, in double precision: nearly orthonormal, and to roundoff in two passes."""
    q = y.astype(np.result_type(y, np.float64), copy=False)
    try:
        for _ in range(passes):  # by Cholesky factors of the Gram matrix, unless it is singular
            q = threads.matmul(q, np.linalg.inv(np.linalg.cholesky(_gram(q))).conj().T)
    except np.linalg.LinAlgError:
        q = np.linalg.qr(y.astype(q.dtype))[0]
    return q
