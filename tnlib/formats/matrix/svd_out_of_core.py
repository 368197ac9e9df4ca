r"""Truncated singular value decomposition of a matrix that exceeds memory.

The smaller side is truncated by its left singular vectors E, in two passes; the projected matrix has the same leading
singular values, and fits in memory if the result does:

    A  ~  E (E^H A)  =  (E U) S V^H,      E^H A  =  U S V^H

"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.array_source import ArraySource
from tnlib.out_of_core.leg_reduction import matrix_of
from tnlib.out_of_core.leg_truncation import truncate_legs
from tnlib.out_of_core.tile_passes import Passes


def svd_of_source(
    passes: Passes, source: ArraySource, rows: Sequence[int], rtol: float | None, max_rank: int | None
) -> tuple[tuple[Array, Array, Array], TruncationBudget]:
    """Return u (m, r), s (r,) and vh (r, n) of the matrix whose rows are the legs `rows`, and the truncation."""
    columns = [a for a in range(len(source.shape)) if a not in rows]
    sides = [math.prod(source.shape[a] for a in legs) for legs in (rows, columns)]
    budget = TruncationBudget(1.0, rtol, [min(sides)], source.dtype)
    legs, others = (rows, columns) if sides[0] <= sides[1] else (columns, rows)
    itemsize = np.result_type(source.dtype, np.float64).itemsize
    if min(sides) > passes.limit.largest_gram(itemsize):
        raise ArgumentError(
            f"svd: memory must hold a Gram matrix of the smaller side, {min(sides):,} of {sides[0]:,} x {sides[1]:,}, "
            f"got {passes.limit.total:,} bytes; raise memory, or split the legs for tt_svd or ttm_svd."
        )
    basis, projected = truncate_legs(passes, source, legs, budget, max_rank)
    small = _in_order(passes, projected, others)
    passes.discard(projected)
    u, s, vh = thin_svd(small)
    u = basis @ u
    return ((u, s, vh) if legs is rows else (vh.T, s, u.T)), budget


def _in_order(passes: Passes, projected: Array, others: Sequence[int]) -> Array:
    """Return the projected array (r, other legs in ascending order) as a matrix with columns in the order `others`."""
    if 3 * projected.nbytes > passes.limit.total:
        raise ArgumentError(
            f"svd: memory must hold the result three times, {3 * projected.nbytes:,} bytes at rank {len(projected)}, "
            f"got {passes.limit.total:,}; raise memory or rtol, or cap the rank."
        )
    order = np.argsort(np.argsort(others))
    return matrix_of(np.array(projected).transpose(0, *(1 + order)), [0])
