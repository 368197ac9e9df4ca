"""The leading left space of a matrix of low rank, from a sample of its rows and one product."""

from __future__ import annotations

import math

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import times_adjoint
from tnlib.linalg.left import left_svd
from tnlib.linalg.rank import tails

_LEAST_ROWS = 64
_ROWS_PER_RANK = 3
_CLEAR = 4.0  # times what a Gram matrix of the sample does not resolve
_FAINT, _ROUNDOFF = 3e-7, 1e-14  # relative: smaller singular values of the sample are rounding errors


def sampled_columns(a: Array, *, limit: float) -> Array | None:
    """Return a V^H (m, l) for a few orthonormal rows V that span nearly the row space of `a` (m, n), or None.

    The leading right singular vectors of some rows, drawn at random, do, if the rank is low and no row stands out;
    and the product with all of `a` then is as good as a step of power iteration. None means that the sample has no
    low rank within the Frobenius norm `limit`. Whether it spoke the truth is for the caller to find out.
    """
    right = _leading_rows(a, limit)
    return None if right is None else times_adjoint(a, right)


def _leading_rows(a: Array, limit: float) -> Array | None:
    """Return orthonormal rows (l, n) that span what matters of a sample of rows, or None where that is much."""
    m, n = a.shape
    rng = np.random.default_rng(0)  # the same input gives the same output
    rows = _LEAST_ROWS
    while 2 * rows <= m:
        sample = a[np.sort(rng.choice(m, rows, replace=False))].astype(np.result_type(a.dtype, np.float64), copy=False)
        whole = math.sqrt(m / rows)  # the norms of the sample times this are those of the matrix, more or less
        found = left_svd(sample[None], exact=False)
        exact = limit < _CLEAR * found.blur * whole
        if exact:
            found = left_svd(sample[None], exact=True)
        sums = tails(found.s) * whole
        clear = int(np.count_nonzero(found.s > found.s[0] * (_ROUNDOFF if exact else _FAINT)))
        rank = max(1, min(int(np.argmax(sums <= limit)), clear))
        if 4 * rank > min(m, n) or clear == 0:
            return None
        if _ROWS_PER_RANK * rank <= rows:
            ample = int(np.argmax(sums <= limit / 4))  # where the spectrum decays, so that little is lost
            kept = max(min(ample, rank + rank // 4), rank + 4)
            kept = min(-(-kept // 4) * 4, clear)  # the kernel works on four at a time
            if 2 * kept > min(m, n):  # so few columns stand for themselves
                return None
            return _orthonormal_rows((found.u[:, :kept] / found.s[:kept]).conj().T @ sample)  # l [rows] n
        rows = max(2 * rows, _ROWS_PER_RANK * rank)
    return None


def _orthonormal_rows(v: Array) -> Array | None:
    """Make nearly orthonormal rows orthonormal to roundoff, by Cholesky factors of their Gram matrix, twice."""
    for _ in range(2):
        try:
            v = np.linalg.inv(np.linalg.cholesky(v @ v.conj().T)) @ v
        except np.linalg.LinAlgError:
            return None
    return v
