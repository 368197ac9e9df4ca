"""The leading left space of a matrix of low rank, from a sample of its rows and one product."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import gram, times_adjoint

_LEAST_ROWS = 64
_ROWS_PER_RANK = 3
_FAINT = 1e-13  # squared, relative: below it a Gram matrix of the sample holds rounding errors


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
        values, vectors = np.linalg.eigh(gram(sample[None]))
        values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
        tails = np.append(np.cumsum(values[::-1])[::-1], 0.0) * (m / rows)  # squared, as the whole matrix would have
        clear = int(np.count_nonzero(values > _FAINT * values[0]))
        rank = max(1, min(int(np.argmax(tails <= limit**2)), clear))
        if 4 * rank > min(m, n) or clear == 0:
            return None
        if _ROWS_PER_RANK * rank <= rows:
            ample = int(np.argmax(tails <= limit**2 / 16))  # where the spectrum decays, so that little is lost
            kept = max(min(ample, rank + rank // 4), rank + 4)
            kept = min(-(-kept // 4) * 4, clear)  # the kernel works on four at a time
            return _orthonormal_rows((vectors[:, :kept] / np.sqrt(values[:kept])).conj().T @ sample)  # l [rows] n
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
