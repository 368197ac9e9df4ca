"""Gram matrices and thin products of long arrays, in double precision whatever the input."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg import threads

# Below this many multiplications BLAS takes a millisecond or two, and loading the kernels would take longer.
KERNEL_WORK = 1 << 24
_KERNEL_ROWS = 512  # above, BLAS is as fast
_WIDTH = 256  # columns of a block, which then stays in the second cache
_BLOCK = 1 << 18  # entries that are converted at a time


def gram(a: Array) -> Array:
    """Return sum_p a[p] a[p]^H, (m, m) Hermitian in float64 or complex128, of a C-contiguous `a` (p, m, n)."""
    slabs, m, n = a.shape
    if np.iscomplexobj(a) or a.size * m < KERNEL_WORK or m > _KERNEL_ROWS:
        return _gram_by_blas(a)
    from tnlib.kernels.dots import add_gram

    padded = -(-m // 4) * 4
    by_columns = n >= slabs
    pieces = [
        (a, (0, slabs) if by_columns else part, part if by_columns else (0, n), _WIDTH, np.zeros((padded, padded)))
        for part in threads.cut(n if by_columns else slabs, threads.count(), multiple=8 if by_columns else 1)
    ]
    threads.spread(add_gram, pieces)
    upper = np.triu(np.sum([out for *_, out in pieces], axis=0)[:m, :m])
    total: Array = upper + np.triu(upper, 1).T
    return total


def times_adjoint(a: Array, b: Array) -> Array:
    """Return a b^H, (m, l) in float64 or complex128, of C-contiguous `a` (m, n) and `b` (l, n) with few rows l."""
    m, n = a.shape
    wide = np.result_type(a.dtype, np.float64)
    b = b.astype(wide, copy=False)
    if np.iscomplexobj(a) or np.iscomplexobj(b) or a.size * len(b) < KERNEL_WORK:
        out = np.empty((m, len(b)), wide)
        step = max(1, _BLOCK // n)
        for i in range(0, m, step):
            np.matmul(a[i : i + step].astype(wide, copy=False), b.conj().T, out=out[i : i + step])
        return out
    from tnlib.kernels.dots import times_rows

    rows, padded = m // 4 * 4, -(-len(b) // 4) * 4
    filled = np.zeros((padded, n))
    filled[: len(b)] = b
    sums = np.zeros((m, padded))
    ranges = threads.cut(rows, threads.count(), multiple=4)
    threads.spread(times_rows, [(a[i:j], filled, 4 * _WIDTH, sums[i:j]) for i, j in ranges])
    sums[rows:] = a[rows:] @ filled.T
    return sums[:, : len(b)]


def _gram_by_blas(a: Array) -> Array:
    slabs, m, n = a.shape
    wide = np.result_type(a.dtype, np.float64)
    total = np.zeros((m, m), wide)
    # Many columns are summed in pieces: of equal terms, in one sum, all would round in the same direction.
    columns, together = max(1, min(n, _BLOCK // m, 1 << 13)), max(1, _BLOCK // (m * n))
    for p in range(0, slabs, together):
        for k in range(0, n, columns):
            block = a[p : p + together, :, k : k + columns].astype(wide, copy=False)
            flat = block.transpose(1, 0, 2).reshape(m, -1)  # m (p n)
            total += flat @ flat.conj().T
    return total
