r"""Row and column selection: pivots, and submatrices of maximal volume (maxvol).

Of a matrix A (m, r) of full rank, r independent rows I span all others with the coefficients

    M = A A[I]^-1,        M[I] = 1,        det A[I, row q replaced by row p] = M[p, q] det A[I],

so that an entry of modulus above 1 belongs to a swap that increases the volume |det A[I]|, and at a local maximum there
is none.
"""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scaling import exponent_of, shift

_SINGULAR = 1e10  # coefficients above this come from rows that are dependent to roundoff
_PASSES = 20  # of swaps, at most: where rows are dependent to roundoff, swaps may cycle


def maxvol(a: Array, rows: Array, *, bound: float) -> tuple[Array, Array] | None:
    """Return rows (r,) of `a` (m, r) and coefficients M (m, r) with modulus at most `bound`, by swaps from `rows`.

    Goreinov et al., "How to find a good submatrix" (2010). None if the rows to begin with are dependent.
    """
    scaled, rows = shift(a, -exponent_of(a)), np.array(rows)
    for k in range(_PASSES):
        try:
            m = np.linalg.solve(scaled[rows].T, scaled.T).T
        except np.linalg.LinAlgError:
            return None
        top = float(np.abs(m).max())
        if not top < _SINGULAR:  # NaN, too
            return None
        if top <= bound or k == _PASSES - 1:
            m[rows] = np.eye(len(rows))  # without rounding
            return rows, m
        for _ in range(len(rows)):  # swaps until rounding adds up, then M is computed anew
            p, q = np.unravel_index(int(np.argmax(np.abs(m))), m.shape)
            if abs(m[p, q]) <= bound:
                break
            change = m[p].copy()
            change[q] -= 1
            m = m - np.multiply.outer(m[:, q] / m[p, q], change)
            rows[q] = p
    return None


def pivots(a: Array, *, least: float, most: int) -> tuple[Array, Array]:
    """Return pivot rows (r,) and columns (r,) of `a` by Gaussian elimination with complete pivoting, r <= `most`.

    It ends when no entry of the Schur complement exceeds `least` in modulus.
    """
    schur = a.copy()
    rows: list[int] = []
    columns: list[int] = []
    while len(rows) < min(most, *a.shape):
        p, q = np.unravel_index(int(np.argmax(np.abs(schur))), schur.shape)
        if not abs(schur[p, q]) > least:
            break
        rows.append(int(p))
        columns.append(int(q))
        schur = schur - np.multiply.outer(schur[:, q], schur[p] / schur[p, q])
        schur[p], schur[:, q] = 0, 0
    return np.array(rows, np.intp), np.array(columns, np.intp)
