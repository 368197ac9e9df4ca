"""The leading singular values and vectors of a large matrix by subspace iteration from random vectors."""

from __future__ import annotations

import math

import numpy as np

from tnlib._typing import Array
from tnlib.linalg import threads
from tnlib.linalg.gram import gram
from tnlib.linalg.left import left_svd
from tnlib.linalg.project import project

_SMALLEST_SIDE = 512  # of a matrix for which an iteration is worth its products
_PART = 5  # of the smaller side: more vectors than this part of it, and LAPACK is as fast
_SETTLED = 5e-4  # relative: what may be missing from the best error
_STEPS = 8
_FAINT = 1e-5  # relative: smaller singular values are not to be had from a Gram matrix


def leading_svd(a: Array, rank: int, *, norm: float, negligible: float) -> tuple[Array, Array, Array, float] | None:
    """Return u (m, l), s (l,), vh (l, n) with l > rank, and norm(a - u diag(s) vh); None where LAPACK is to be asked.

    Subspace iteration (Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review 53 (2011),
    algorithm 4.4) with a few vectors more than `rank`, until the error at `rank` is the best one to a part in a
    thousand. How many steps that takes depends on how slowly the spectrum decays; the error returned does not: the
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
    single = np.finfo(a.dtype).eps > np.finfo(np.float64).eps
    rng = np.random.default_rng(0)  # the same input gives the same output
    y = threads.matmul(a, rng.standard_normal((n, count)).astype(a.real.dtype))
    previous = math.inf
    for _ in range(_STEPS):
        x = _orthonormal(threads.matmul(_adjoint(a), y), roughly=True)
        y = threads.matmul(a, x)
        squares = np.linalg.eigvalsh(_column_gram(y))[::-1]
        error = math.sqrt(max(0.0, norm**2 - float(squares[:rank].sum())))
        # A step shrinks what is still missing by this factor at least, and the projection to come by its root.
        factor = float(squares[-1] / squares[rank - 1]) ** 2
        missing = (previous - error) * factor / max(1 - factor, _SETTLED) * math.sqrt(factor)
        if error <= negligible or missing <= _SETTLED * error:
            break
        previous = error
    else:
        return None
    q = _orthonormal(y, roughly=single)
    small, lost = project(q, a, size=norm, negligible=negligible)  # l n
    left = left_svd(small[None], exact=False)
    if left.s[rank - 1] < _FAINT * left.s[0]:
        return None
    keep = int(np.count_nonzero(left.s >= _FAINT * left.s[0]))
    u, s = left.u[:, :keep], left.s[:keep]
    vh = threads.matmul(_adjoint(u / s), small)
    if not single:
        vh = _adjoint(_orthonormal(_adjoint(vh), roughly=False))
    return threads.matmul(q, u), s, vh, math.hypot(lost, float(np.linalg.norm(left.s[keep:])))


def _adjoint(a: Array) -> Array:
    return a.conj().T if np.iscomplexobj(a) else a.T


def _column_gram(y: Array) -> Array:
    return gram(np.ascontiguousarray(y.T)[None]).conj()


def _orthonormal(y: Array, *, roughly: bool) -> Array:
    """Return columns that span those of `y` by Cholesky factors of their Gram matrix: once, or twice to roundoff."""
    wide = np.result_type(y, np.float64)
    try:
        for _ in range(1 if roughly else 2):
            inverse = np.linalg.inv(np.linalg.cholesky(_column_gram(y)))
            y = threads.matmul(y, _adjoint(inverse).astype(y.dtype if roughly else wide))
    except np.linalg.LinAlgError:  # singular
        return np.linalg.qr(y)[0]
    return y
