r"""Rows and columns that stand for a matrix: pivots, and the interpolation through chosen rows.

Of a matrix A (m, r) of full rank, r rows I span all others with the coefficients

    M = A A[I]^-1,        M[I] = 1,        det A[I with row p in the place of row q] = M[p, q] det A[I],

so that an entry of modulus above 1 names a swap that raises the volume |det A[I]|, and at a maximum no entry is larger.
"""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scale import exponent, shift

_SINGULAR = 1e10  # an interpolation with larger entries is not one
_PASSES = 20  # of swaps, at most: where rows are dependent but for rounding, these may go round in circles


def maxvol(a: Array, rows: Array, *, bound: float) -> tuple[Array, Array] | None:
    """Swap rows of `a` (m, r) against `rows` (r,) until the interpolation through them has no entry above `bound`.

    Return the new rows and the interpolation (m, r), Goreinov et al., "How to find a good submatrix" (2010). None where
    the rows to begin with are dependent.
    """
    scaled, rows = shift(a, -exponent(a)), np.array(rows)
    for left in reversed(range(_PASSES)):
        try:
            m = np.linalg.solve(scaled[rows].T, scaled.T).T
        except np.linalg.LinAlgError:
            return None
        top = float(np.abs(m).max())
        if not top < _SINGULAR:  # NaN, too
            return None
        if top <= bound or not left:
            m[rows] = np.eye(len(rows))  # free of rounding
            return rows, m
        for _ in range(len(rows)):  # swaps until rounding adds up, then anew
            p, q = np.unravel_index(int(np.argmax(np.abs(m))), m.shape)
            if abs(m[p, q]) <= bound:
                break
            change = m[p].copy()
            change[q] -= 1
            m = m - np.multiply.outer(m[:, q] / m[p, q], change)
            rows[q] = p
    return None


def leading_rows(a: Array) -> Array | None:
    """Return rows (r,) of `a` (m, r), r <= m, by Gaussian elimination with partial pivoting: a matrix product's time.

    None where its columns are dependent.
    """
    from scipy.linalg import lu

    row_of, _, upper = lu(shift(a, -exponent(a)), p_indices=True, check_finite=False)
    diagonal = np.abs(np.diag(upper))
    if not diagonal.min(initial=1.0) > len(a) * np.finfo(a.dtype).eps * diagonal.max(initial=0.0):
        return None
    rows: Array = np.argsort(row_of)[: a.shape[1]]
    return rows


def pivots(a: Array, *, least: float, most: int) -> tuple[Array, Array]:
    """Return rows (r,) and columns (r,) of `a` by Gaussian elimination with complete pivoting, r <= `most`.

    It ends where nothing is left above `least` in modulus.
    """
    rest = a.copy()
    rows: list[int] = []
    columns: list[int] = []
    while len(rows) < min(most, *a.shape):
        p, q = np.unravel_index(int(np.argmax(np.abs(rest))), rest.shape)
        if not abs(rest[p, q]) > least:
            break
        rows.append(int(p))
        columns.append(int(q))
        rest = rest - np.multiply.outer(rest[:, q], rest[p] / rest[p, q])
        rest[p], rest[:, q] = 0, 0
    return np.array(rows, np.intp), np.array(columns, np.intp)
