r"""Interpolative form of a matrix product: the r^2 gauge degrees of freedom are not stored.

A product L R of inner size r equals (L G)(G^-1 R) for every invertible G. G is chosen such that r rows I of L become
the unit matrix,

    L R  =  (L L[I]^-1) (L[I] R),

which is not stored: what remains are the rows I of the product and the coefficients of the other rows, an interpolative
decomposition. The rows are chosen such that no coefficient exceeds 2 in modulus (approximately maximal volume): this is
well conditioned for every product and survives rounding to half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.maxvol import maxvol, pivots
from tnlib.linalg.scaling import exponent_of, shift
from tnlib_adapters.factors.factored_matrix import FactoredMatrix

_LARGEST = 2.0  # bound on the entries of L L[I]^-1


def without_gauge(matrix: FactoredMatrix) -> FactoredMatrix:
    """Return a product of two factors, whose left one may have a bias as last row, in interpolative form.

    Other matrices are returned as they are.
    """
    if matrix.kind != "low_rank":
        return matrix
    left, right, rows = pack(*(matrix.arrays[part].astype(np.float64) for part in ("left", "right")))
    factors = {part: a.astype(matrix.arrays[part].dtype) for part, a in {"left": left, "right": right}.items()}
    return replace(matrix, kind="interpolative", arrays={**matrix.arrays, **factors}, rows=rows)


def pack(left: Array, right: Array) -> tuple[Array, Array, tuple[int, ...]]:
    """Return the rows of L L[I]^-1 that are not in I (m - r, r), L[I] R (r, n), and I, ascending.

    The inner size is reduced to the rank of `left` (m, r).
    """
    rows = pivot_rows(left) if left.shape[1] <= len(left) else None
    if rows is None:
        left, right, rows = _independent(left, right)
    if not len(rows):
        return left[:, :0], right[:0], ()
    maximal_volume = maxvol(left, rows, bound=_LARGEST)
    if maximal_volume is None:
        raise ArithmeticError(f"pack: {len(rows)} pivots of a left factor of shape {left.shape} are dependent")
    rows, interpolation = maximal_volume
    order = np.argsort(rows)
    rest = np.delete(interpolation[:, order], rows, axis=0)  # (m - r) r
    return rest, left[rows[order]] @ right, tuple(int(row) for row in rows[order])


def _independent(left: Array, right: Array) -> tuple[Array, Array, Array]:
    """Return the same product over linearly independent columns of `left`, and as many pivot rows."""
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


def pivot_rows(a: Array) -> Array | None:
    """Return the pivot rows (r,) of `a` (m, r), r <= m, by an LU factorization, in the time of a matrix product.

    None if its columns are dependent.
    """
    from scipy.linalg import lu

    row_of, _, upper = lu(shift(a, -exponent_of(a)), p_indices=True, check_finite=False)
    diagonal = np.abs(np.diag(upper))
    if not diagonal.min(initial=1.0) > len(a) * np.finfo(a.dtype).eps * diagonal.max(initial=0.0):
        return None
    rows: Array = np.argsort(row_of)[: a.shape[1]]
    return rows
