"""Truncated singular value decomposition of a matrix that is read once: A ~ C V by sketches, then the SVD of C."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tnlib._typing import Array
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.threads import parallel_matmul
from tnlib.out_of_core.one_read import OneRead
from tnlib.out_of_core.sketched_matrix import SketchedMatrix


def svd_one_pass(
    read: OneRead, rows: Sequence[int], rtol: float | None, max_rank: int
) -> tuple[tuple[Array, Array, Array], int, float]:
    """Return u (m, r), s (r,), vh (r, n), their power of two, and the estimated relative error."""
    sketch = SketchedMatrix(read, rows, max_rank)
    m = math.prod(read.shape[k] for k in rows)
    budget = sketch.budget(rtol, [min(m, math.prod(read.shape) // m)], read.dtype)
    u, s, w = thin_svd(sketch.left)
    rank = budget.truncate(s, max_rank=max_rank)
    u, s, vh = u[:, :rank], s[:rank], parallel_matmul(w[:rank], sketch.right)  # rank [k] n
    return (u, s, vh), sketch.exponent, sketch.relative_error(u * s, vh)
