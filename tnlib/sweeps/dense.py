"""The cores of a train to a dense array, and the legs of matrices in pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array


def cores_to_dense(cores: Sequence[Array]) -> Array:
    """Contract cores (r[k], n[k], r[k+1]) to the array of size n[0] ... n[d-1], flat."""
    out = np.array(cores[0]).reshape(-1, cores[0].shape[-1])  # n0 r; a copy, since of one core it is the result
    for core in cores[1:]:
        out = (out @ core.reshape(len(core), -1)).reshape(-1, core.shape[-1])  # (n0 ... [r]) [r] nk r'
    return out.reshape(-1)


def fuse_row_and_column(cores: Sequence[Array]) -> list[Array]:
    """Return TT-matrix cores (r, m, n, r') as train cores (r, m * n, r')."""
    return [core.reshape(len(core), -1, core.shape[-1]) for core in cores]


def pair_legs(a: Array, row_shape: Sequence[int], col_shape: Sequence[int]) -> Array:
    """Return a matrix (prod m, prod n) as the array (m[0] n[0], m[1] n[1], ...) with paired legs."""
    d = len(row_shape)
    order = [leg for k in range(d) for leg in (k, d + k)]  # m0 n0 m1 n1 ...
    pairs = [m * n for m, n in zip(row_shape, col_shape, strict=True)]
    return a.reshape(*row_shape, *col_shape).transpose(order).reshape(pairs)


def unpair_legs(x: Array, row_shape: Sequence[int], col_shape: Sequence[int]) -> Array:
    """Undo `pair_legs`: the array (m[0] n[0], m[1] n[1], ...), flat or not, as the matrix (prod m, prod n)."""
    pairs = [(m, n) for m, n in zip(row_shape, col_shape, strict=True) if m * n > 1]  # numpy has at most 64 legs
    d = len(pairs)
    split = [size for pair in pairs for size in pair]  # m0 n0 m1 n1 ...
    order = [*range(0, 2 * d, 2), *range(1, 2 * d, 2)]  # m0 m1 ... n0 n1 ...
    return np.ascontiguousarray(x.reshape(split).transpose(order)).reshape(math.prod(row_shape), -1)
