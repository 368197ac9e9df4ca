r"""TT-SVD of an array that is read once.

A sketch of the matrix of about half of the legs gives A ~ C V with orthonormal rows V (`matrix_sketch.py`). The cores
of the left half are those of C. With their isometry E, the cores of the right half are those of E^H C V: the TT-SVD of
C V, whose truncations add up to the error of the sketch.

D. Kressner, B. Vandereycken, R. Voorhaar, "Streaming tensor train approximation", SIAM J. Sci. Comput. 45 (2023),
sketch every bond; here one sketch of the middle bond is enough, as both halves fit in memory.
"""

from __future__ import annotations

import math
from typing import Any

from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.leg_splitting import merge_cores, split_legs
from tnlib.out_of_core.one_read import OneRead
from tnlib.out_of_core.sketched_matrix import SketchedMatrix

_COLUMN_COST = 8  # every tile adds to all sums over columns, but to its own rows only


def tt_svd_one_pass(x: Any, rtol: float | None, max_rank: int, memory: float | None) -> tuple[TensorTrain, float]:
    """Return the left-canonical train and the estimate of its relative error."""
    read = OneRead("tt_svd", "x", x, memory)
    sizes = read.shape
    read.require_legs(2)
    half = min(range(1, len(sizes)), key=lambda k: math.prod(sizes[:k]) + _COLUMN_COST * math.prod(sizes[k:]))
    sketch = SketchedMatrix(read, range(half), max_rank)
    sides = [min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes))]
    budget = sketch.budget(rtol, sides, read.dtype)
    head, rest = split_legs(sketch.left.reshape(1, -1), sizes[:half], budget, max_rank)
    tail, rest = split_legs(rest @ sketch.right, sizes[half:-1], budget, max_rank)
    last = rest.reshape(-1, sizes[-1], 1)
    right = merge_cores([*tail, last]).reshape(head[-1].shape[2], -1)  # r (n ... n)
    error = sketch.relative_error(merge_cores(head), right)
    cores = [core.astype(read.dtype, copy=False) for core in (*head, *tail, last)]
    return TensorTrain.from_sweep(cores, len(cores) - 1, sketch.exponent), error
