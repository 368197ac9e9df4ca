r"""Truncated singular value decomposition of a matrix that exceeds memory.

In passes, the smaller side is truncated by its left singular vectors E, in two passes; the projected matrix has the
same leading singular values, and fits in memory if the result does:

    A  ~  E (E^H A)  =  (E U) S V^H,      E^H A  =  U S V^H

In one read, sketches give A ~ C V with orthonormal rows V (`out_of_core/matrix_sketch.py`), and the SVD of C follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.multilinear import matrix_onto
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.threads import parallel_matmul
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.leg_truncation import truncate_legs
from tnlib.out_of_core.matrix_sketch import SketchedError, SketchedMatrix, require_rank
from tnlib.out_of_core.one_read import OneRead
from tnlib.out_of_core.passes import Passes

Parts: TypeAlias = tuple[Array, Array, Array]  # u (m, r), s (r,), vh (r, n)


def decompose_stored(
    opened: Passes | OneRead, rows: Sequence[int], rtol: float | None, max_rank: int | None
) -> tuple[Parts, int, TruncationBudget | SketchedError]:
    """Return u, s and vh of the matrix whose rows are the legs `rows`, their power of two, and the error."""
    if isinstance(opened, OneRead):
        return _svd_in_one_read(opened, rows, rtol, require_rank(opened.function, max_rank))
    with opened as passes:
        parts, budget = _svd_in_passes(passes, rows, rtol, max_rank)
        return parts, passes.source.exponent, budget


def _svd_in_passes(
    passes: Passes, rows: Sequence[int], rtol: float | None, max_rank: int | None
) -> tuple[Parts, TruncationBudget]:
    source = passes.source
    columns = [a for a in range(len(source.shape)) if a not in rows]
    sides = [math.prod(source.shape[a] for a in legs) for legs in (rows, columns)]
    budget = TruncationBudget(1.0, rtol, [min(sides)], source.dtype, max_rank)
    legs, others = (rows, columns) if sides[0] <= sides[1] else (columns, rows)
    if min(sides) > passes.limit.largest_gram(source.dtype):
        raise ArgumentError(
            f"svd: storage.memory must hold a Gram matrix of the smaller side, {min(sides):,} of {sides[0]:,} x "
            f"{sides[1]:,}, got {passes.limit.total:,} bytes; raise it, or split the legs for tt_svd or ttm_svd."
        )
    basis, projected = truncate_legs(passes, source, legs, budget)
    small = _in_order(passes, projected, others)
    passes.discard(projected)
    u, s, vh = thin_svd(small)
    u = basis @ u
    return ((u, s, vh) if legs is rows else (vh.T, s, u.T)), budget


def _in_order(passes: Passes, projected: Array, others: Sequence[int]) -> Array:
    """Return the projected array (r, other legs in ascending order) as a matrix with columns in the order `others`."""
    if 3 * projected.nbytes > passes.limit.total:
        raise ArgumentError(
            f"svd: storage.memory must hold the result three times, {3 * projected.nbytes:,} bytes at rank "
            f"{len(projected)}, got {passes.limit.total:,}; raise it or rtol, or cap the rank."
        )
    order = np.argsort(np.argsort(others))
    return matrix_onto(np.array(projected).transpose(0, *(1 + order)), [0])


def _svd_in_one_read(
    read: OneRead, rows: Sequence[int], rtol: float | None, max_rank: int
) -> tuple[Parts, int, SketchedError]:
    sketch = SketchedMatrix(read, rows, max_rank)
    m = math.prod(read.shape[k] for k in rows)
    budget = sketch.budget(rtol, [min(m, math.prod(read.shape) // m)], read.dtype, max_rank)
    u, s, w = thin_svd(sketch.left)
    rank = budget.truncate(s)
    u, s, vh = u[:, :rank], s[:rank], parallel_matmul(w[:rank], sketch.right)  # rank [k] n
    return (u, s, vh), sketch.exponent, SketchedError(sketch.relative_error(u * s, vh))
