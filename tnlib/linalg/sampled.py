"""A tall or square matrix of low rank from a sample of its rows, with the error that was made."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import gram, times_adjoint
from tnlib.linalg.scale import norm as frobenius

_LEAST_ROWS = 64
_ROWS_PER_RANK = 6  # fewer, and noise tilts the sampled space
_OVERSAMPLE = 8
_FAINT = 1e-13  # squared, relative: below it a Gram matrix of the sample holds rounding errors
_DIFFERENCE = 1e-11  # a difference of squares above this part of them has a few digits to show
_ROUNDING = 1e-14  # of the squares
_BLOCK = 1 << 20


class Sampled(NamedTuple):
    """left @ right is the projection of the matrix on the row space of `right`."""

    left: Array  # (m, l)
    right: Array  # (l, n), orthonormal rows
    lost: float  # Frobenius norm of the rest


def sampled_split(a: Array, *, norm: float, limit: float) -> Sampled | None:
    """Return `a` (m, n) as a product with at most `limit` lost in Frobenius norm, or None where the sample says no.

    The leading right singular vectors of a few rows, drawn at random, span nearly the row space of a matrix of low
    rank; a matrix with a few outstanding rows is not found out. But nothing is left to chance: what is projected
    away is orthogonal to what is kept, so its norm follows from the norms of the two, or, where that difference
    would be rounding errors, is measured. The cost is one product with few columns.

    Parameters
    ----------
    a
        C-contiguous.
    norm
        Frobenius norm of `a`.
    limit
        Norm that may be lost. The vectors kept are a few more than it takes, so that far less is lost where the
        spectrum decays.
    """
    m, n = a.shape
    right = _leading_rows(a, limit)
    if right is None:
        return None
    left = times_adjoint(a, right)  # m l
    squares = norm**2 - frobenius(left) ** 2
    if squares > _DIFFERENCE * norm**2 or np.finfo(a.dtype).eps > np.finfo(np.float64).eps:
        lost = math.sqrt(max(0.0, squares) + _ROUNDING * norm**2)
    else:
        lost = _distance(a, left, right)
    return Sampled(left, right, lost) if lost <= limit else None


def _leading_rows(a: Array, limit: float) -> Array | None:
    """Return orthonormal rows (l, n) that span what matters of a sample of rows, or None where that is much."""
    m, n = a.shape
    rng = np.random.default_rng(0)  # the same input gives the same output
    rows = 2 * _LEAST_ROWS if m >= 16 * _LEAST_ROWS else _LEAST_ROWS
    while 2 * rows <= m:
        sample = a[np.sort(rng.choice(m, rows, replace=False))].astype(np.result_type(a.dtype, np.float64), copy=False)
        values, vectors = np.linalg.eigh(gram(sample[None]))
        values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
        tails = np.append(np.cumsum(values[::-1])[::-1], 0.0) * (m / rows)  # squared, as the whole matrix would have
        clear = int(np.count_nonzero(values > _FAINT * values[0]))
        rank = max(1, min(int(np.argmax(tails <= limit**2)), clear))
        if 4 * rank > min(m, n):
            return None
        if _ROWS_PER_RANK * rank <= rows:
            kept = min(rank + _OVERSAMPLE, clear)
            if kept == 0:
                return None
            lengths = np.sqrt(values[:kept])
            return _orthonormal_rows((vectors[:, :kept] / lengths).conj().T @ sample)  # l [rows] n
        rows = max(2 * rows, _ROWS_PER_RANK * rank)
    return None


def _orthonormal_rows(v: Array) -> Array | None:
    """Make nearly orthonormal rows orthonormal to roundoff, by Cholesky factors of their Gram matrix, twice."""
    for _ in range(2):
        try:
            v = np.linalg.solve(np.linalg.cholesky(v @ v.conj().T), v)
        except np.linalg.LinAlgError:
            return None
    return v


def _distance(a: Array, left: Array, right: Array) -> float:
    """Return norm(a - left @ right), a few rows at a time."""
    step = max(1, _BLOCK // a.shape[1])
    parts = [frobenius(a[i : i + step] - left[i : i + step] @ right) for i in range(0, len(a), step)]
    return frobenius(np.array(parts))
