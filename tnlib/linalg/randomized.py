"""The leading singular values and vectors of a large matrix by subspace iteration from random vectors."""

from __future__ import annotations

import math

import numpy as np

from tnlib._typing import Array
from tnlib.linalg import threads
from tnlib.linalg.gram import gram
from tnlib.linalg.left import left_svd
from tnlib.linalg.project import project
from tnlib.linalg.scale import shift
from tnlib.linalg.svd import thin_svd

_SMALLEST_SIDE = 512  # of a matrix for which an iteration is worth its products
_PART = 5  # of the smaller side: more vectors than this part of it, and LAPACK is as fast
_SETTLED = 1e-3  # relative: what may be missing from the best error
_STEPS = 8
_IN_RANGE = 12  # powers of two, of 127 in single precision
_FAINT = 1e-5  # relative: smaller singular values are not to be had from a Gram matrix
_SPENT = 1e-7  # relative: nor do smaller diagonals of a Cholesky factor span anything
_COARSE = 1e-3  # of the squares: what single precision discards is then known to a part in a thousand


def leading_svd(a: Array, rank: int, *, norm: float, negligible: float) -> tuple[Array, Array, Array, float] | None:
    """Return u (m, rank), s (l,), vh (rank, n), l > rank, and what s leaves of `a`; None where LAPACK is to be asked.

    Subspace iteration (Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review 53 (2011),
    algorithm 4.4) with half as many vectors more than `rank`, until the error at `rank` seems to be the best one to a
    part in a thousand. How near it is depends on the spectrum; what is returned as lost does not: the norm of what
    lies outside the space found is measured, not estimated.

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
    if min(m, n) < _SMALLEST_SIDE or count * _PART > min(m, n) or norm == 0:
        return None
    twos = math.frexp(norm)[1]  # set aside: the sixth power of a norm is formed
    if abs(twos) > _IN_RANGE:
        found = leading_svd(
            shift(a, -twos), rank, norm=math.ldexp(norm, -twos), negligible=math.ldexp(negligible, -twos)
        )
        return None if found is None else (found[0], shift(found[1], twos), found[2], math.ldexp(found[3], twos))
    single = np.finfo(a.dtype).eps > np.finfo(np.float64).eps
    rng = np.random.default_rng(0)  # the same input gives the same output
    y = threads.matmul(a, rng.standard_normal((n, count), a.real.dtype))
    previous = math.inf
    for _ in range(_STEPS):
        x = _orthonormal(threads.matmul(_adjoint(a), y), roughly=True)
        y = threads.matmul(a, x)
        squares = np.linalg.eigvalsh(_column_gram(y))[::-1]
        error = math.sqrt(max(0.0, norm**2 - float(squares[:rank].sum())))
        # A step shrinks what is missing by about this factor, once the values have settled.
        factor = float(squares[-1] / squares[rank - 1]) ** 2
        missing = (previous - error) * factor / max(1 - factor, _SETTLED)
        if error <= negligible or missing <= _SETTLED * error:
            break
        previous = error
    else:
        return None
    if single and error**2 > _COARSE * norm**2:
        return _ritz(x, y, rank, norm)
    q = _orthonormal(y.astype(np.result_type(y, np.float64), copy=False), roughly=False)
    small, lost = project(q, a, size=norm, negligible=negligible)  # l n
    left = left_svd(small[None], exact=not single)
    if left.s[rank - 1] > _FAINT * left.s[0]:
        u, s = left.u, left.s
        vh = threads.matmul(_adjoint(u[:, :rank] / s[:rank]), small)
        if not single:
            vh = _adjoint(_orthonormal(_adjoint(vh), roughly=False))
    else:
        u, s, vh = thin_svd(small)
    return threads.matmul(q, u[:, :rank]), s, vh[:rank], lost


def _ritz(x: Array, y: Array, rank: int, norm: float) -> tuple[Array, Array, Array, float]:
    """Return what `leading_svd` does from a basis x (n, l) of right vectors, nearly orthonormal, and y = a x."""
    to_orthonormal = _adjoint(np.linalg.inv(np.linalg.cholesky(_column_gram(x))))
    values, vectors = np.linalg.eigh(_adjoint(to_orthonormal) @ _column_gram(y) @ to_orthonormal)
    s = np.sqrt(np.maximum(values[::-1], 0.0))
    to_ritz = to_orthonormal @ vectors[:, : -rank - 1 : -1]
    u = threads.matmul(y.astype(to_ritz.dtype), to_ritz / s[:rank])
    vh = threads.matmul(_adjoint(to_ritz), _adjoint(x).astype(to_ritz.dtype))
    return u, s, vh, math.sqrt(max(0.0, norm**2 - float(values.sum())))


def _adjoint(a: Array) -> Array:
    return a.conj().T if np.iscomplexobj(a) else a.T


def _column_gram(y: Array) -> Array:
    return gram(np.ascontiguousarray(y.T)[None]).conj()


def _orthonormal(y: Array, *, roughly: bool) -> Array:
    """Return columns that span those of `y` by Cholesky factors of their Gram matrix: once, or twice to roundoff."""
    try:
        for _ in range(1 if roughly else 2):
            lower = np.linalg.cholesky(_column_gram(y))
            diagonal = np.diagonal(lower).real
            if diagonal.min() < _SPENT * diagonal.max():
                break
            y = threads.matmul(y, _adjoint(np.linalg.inv(lower)).astype(y.dtype))
        else:
            return y
    except np.linalg.LinAlgError:
        pass
    return np.linalg.qr(y)[0]  # some columns are nearly combinations of others
