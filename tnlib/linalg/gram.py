"""Gram matrices and thin products of long arrays, in double precision for any input."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.threads import run_parallel, split_range, thread_count

# Multiplications from which the kernels are used; BLAS does fewer in a millisecond or two, and loading takes longer.
KERNEL_WORK = 1 << 24
_KERNEL_ROWS = 512  # above, BLAS is as fast
_WIDTH = 256  # columns of a block, which then stays in the second cache
_BLOCK = 1 << 18  # entries that are converted at a time


def gram(a: Array) -> Array:
    """Return sum_p a[p] a[p]^H, (m, m) Hermitian in float64 or complex128, of a C-contiguous `a` (p, m, n)."""
    m = a.shape[1]
    if a.dtype.kind == "c" or a.size * m < KERNEL_WORK or m > _KERNEL_ROWS:
        return gram_by_blas(a)
    return gram_by_kernel(a)


def gram_by_kernel(a: Array) -> Array:
    """Return `gram` of a real array by the compiled kernel, over slabs or columns in parallel."""
    from tnlib.linalg.kernels.dot_products import add_gram

    slabs, m, n = a.shape
    padded = -(-m // 4) * 4
    by_columns = n >= slabs
    pieces = [
        (a, (0, slabs) if by_columns else part, part if by_columns else (0, n), _WIDTH, np.zeros((padded, padded)))
        for part in split_range(n if by_columns else slabs, thread_count(), multiple=8 if by_columns else 1)
    ]
    run_parallel(add_gram, pieces)
    upper = np.triu(np.sum([out for *_, out in pieces], axis=0)[:m, :m])
    total: Array = upper + np.triu(upper, 1).T
    return total


def gram_by_blas(a: Array) -> Array:
    """Return `gram` by matrix products of converted blocks."""
    slabs, m, n = a.shape
    wide = np.result_type(a.dtype, np.float64)
    total = np.zeros((m, m), wide)
    # Many columns are summed in blocks: of equal terms, in one sum, all would round in the same direction.
    columns, block_slabs = max(1, min(n, _BLOCK // m, 1 << 13)), max(1, _BLOCK // (m * n))
    for p in range(0, slabs, block_slabs):
        for k in range(0, n, columns):
            block = a[p : p + block_slabs, :, k : k + columns].astype(wide, copy=False)
            flat = block.transpose(1, 0, 2).reshape(m, -1)  # m (p n)
            total += flat @ flat.conj().T  # m [(p n)] m
    return total


def times_adjoint(a: Array, b: Array) -> Array:
    """Return a b^H, (m, l) in float64 or complex128, of C-contiguous `a` (m, n) and `b` (l, n) with few rows l."""
    if a.dtype.kind == "c" or b.dtype.kind == "c" or a.size * len(b) < KERNEL_WORK:
        return times_adjoint_by_blas(a, b)
    return times_adjoint_by_kernel(a, b)


def times_adjoint_by_kernel(a: Array, b: Array) -> Array:
    """Return `times_adjoint` of real arrays by the compiled kernel, over rows in parallel."""
    from tnlib.linalg.kernels.dot_products import times_rows

    m, n = a.shape
    rows, padded = m // 4 * 4, -(-len(b) // 4) * 4
    filled = np.zeros((padded, n))
    filled[: len(b)] = b
    out = np.zeros((m, padded))
    ranges = split_range(rows, thread_count(), multiple=4)
    run_parallel(times_rows, [(a[i:j], filled, 4 * _WIDTH, out[i:j]) for i, j in ranges])
    out[rows:] = a[rows:] @ filled.T  # m [n] l
    return out[:, : len(b)]


def times_adjoint_by_blas(a: Array, b: Array) -> Array:
    """Return `times_adjoint` by matrix products of converted blocks of rows."""
    m, n = a.shape
    wide = np.result_type(a.dtype, b.dtype, np.float64)
    adjoint = b.astype(wide, copy=False).conj().T
    out = np.empty((m, len(b)), wide)
    step = max(1, _BLOCK // n)
    for i in range(0, m, step):
        np.matmul(a[i : i + step].astype(wide, copy=False), adjoint, out=out[i : i + step])  # m [n] l
    return out
