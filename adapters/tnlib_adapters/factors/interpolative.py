r"""Products without the numbers that their gauge frees.

A product L R of inner size r is the same for every (L G, G^-1 R): r^2 of its numbers say nothing. Rows I of L, r of
them, are made the unit matrix,

    L R  =  (L L[I]^-1) (L[I] R),

and are not stored: the rows I of the product, and how the others combine them, an interpolative decomposition. The rows
are chosen so that no entry of the others exceeds 2: a well-conditioned choice, whatever the product, and one that
survives rounding to half precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.maxvol import maxvol, pivot_rows, pivots

_LARGEST = 2.0  # entry of L L[I]^-1


def pack(left: Array, right: Array) -> tuple[Array, Array, tuple[int, ...]]:
    """Return the rows of L L[I]^-1 that are not in I (m - r, r), L[I] R (r, n), and I, ascending.

    The inner size falls to the rank of `left` (m, r) where that is less.
    """
    rows = pivot_rows(left) if left.shape[1] <= len(left) else None
    if rows is None:
        left, right, rows = _independent(left, right)
    if not len(rows):
        return left[:, :0], right[:0], ()
    found = maxvol(left, rows, bound=_LARGEST)
    if found is None:
        raise ArithmeticError(f"pack: {len(rows)} pivots of a left factor of shape {left.shape} are dependent")
    rows, interpolation = found
    order = np.argsort(rows)
    rest = np.delete(interpolation[:, order], rows, axis=0)  # (m - r) r
    return rest, left[rows[order]] @ right, tuple(int(row) for row in rows[order])


def _independent(left: Array, right: Array) -> tuple[Array, Array, Array]:
    """Return the same product over independent columns of `left`, and as many of its rows."""
    rows, columns = pivots(left, least=1e-12 * float(np.abs(left).max(initial=0.0)), most=left.shape[1])
    basis = left[:, columns]
    mixing = np.linalg.lstsq(basis, left, rcond=None)[0] if len(columns) else np.zeros((0, left.shape[1]))
    return basis, mixing @ right, rows


def unpack(rest: Array, rows: Sequence[int]) -> Array:
    """Return L L[I]^-1 with its unit rows, (m, r)."""
    r = len(rows)
    left = np.empty((len(rest) + r, r), rest.dtype)
    others = np.delete(np.arange(len(left)), rows)
    left[others], left[list(rows)] = rest, np.eye(r, dtype=rest.dtype)
    return left
