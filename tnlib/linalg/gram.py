"""Gram matrices, thin products and projections of long arrays, in double precision for any input."""

from __future__ import annotations

import math

import numpy as np

from tnlib._array_api import adjoint
from tnlib._typing import Array
from tnlib.linalg.scaling import norm
from tnlib.linalg.threads import parallel_matmul, run_parallel, split_range, thread_count

# Multiplications from which the kernels are used: loading them takes most of a second, in which BLAS does hundreds of
# times as many.
KERNEL_WORK = 1 << 25
# Rows up to which the kernels are about 1.3 times as fast as BLAS or more, by bytes of a number; BLAS needs converted
# copies of single precision, and transposed ones of slabs. For one slab in double precision BLAS may be as fast.
_GRAM_ROWS, _FACTOR_ROWS = {4: 64, 8: 16}, {4: 16, 8: 12}
_WIDTH = 256  # columns of a block, which then stays in the second cache
_BLOCK, _PRODUCT_COLUMNS = 1 << 18, 1 << 11  # entries that are converted at a time, and columns of a product with few


def gram(a: Array) -> Array:
    """Return sum_p a[p] a[p]^H, (m, m) Hermitian in float64 or complex128, of a C-contiguous `a` (p, m, n)."""
    slabs, m, _ = a.shape
    is_double_matrix = a.itemsize == 8 and slabs == 1
    if a.dtype.kind == "c" or is_double_matrix or a.size * m < KERNEL_WORK or m > _GRAM_ROWS[a.itemsize]:
        return gram_by_blas(a)
    return gram_by_kernel(a)


def gram_by_kernel(a: Array) -> Array:
    """Return `gram` of a real array by the compiled kernel, over slabs or columns in parallel."""
    from tnlib.linalg.kernels import add_gram

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
    is_complex = a.dtype.kind == "c" or b.dtype.kind == "c"
    if is_complex or a.size * len(b) < KERNEL_WORK or len(b) > _FACTOR_ROWS[a.itemsize]:
        return times_adjoint_by_blas(a, b)
    return times_adjoint_by_kernel(a, b)


def times_adjoint_by_kernel(a: Array, b: Array) -> Array:
    """Return `times_adjoint` of real arrays by the compiled kernel, over rows in parallel."""
    from tnlib.linalg.kernels import times_rows

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
    """Return `times_adjoint` by matrix products of converted blocks, over rows in parallel."""
    m, n = a.shape
    wide = np.result_type(a.dtype, b.dtype, np.float64)
    out = np.zeros((m, len(b)), wide)
    columns = min(n, _PRODUCT_COLUMNS)
    step = max(1, _BLOCK // columns)

    def multiply(start: int, stop: int) -> None:
        for k in range(0, n, columns):
            right = b[:, k : k + columns].astype(wide, copy=False).conj().T
            for i in range(start, stop, step):
                rows = slice(i, min(i + step, stop))
                out[rows] += a[rows, k : k + columns].astype(wide, copy=False) @ right  # m [n] l

    run_parallel(multiply, split_range(m, thread_count() if a.size > _PROJECTED_BLOCK else 1, multiple=8))
    return out


_DIFFERENCE = 1e-11  # a difference of squares above this part of them is right to a few parts in a thousand
_ROUNDING = 1e-14  # of the squares
_PROJECTED_BLOCK = 1 << 20  # entries


def adjoint_times(e: Array, a: Array) -> Array:
    """Return e^H a[p] for every p, (p, r, n) in double precision, of `e` (m, r) and `a` (p, m, n)."""
    slabs, m, n = a.shape
    if not isinstance(a, np.ndarray):
        return adjoint(e) @ a  # p r [m] n, in their own precision
    dtype = np.result_type(e, a, np.float64)
    e_adjoint = np.ascontiguousarray(e.conj().T, np.result_type(e, np.float64))
    out = np.empty((slabs, len(e_adjoint), n), dtype)
    if a.size <= _PROJECTED_BLOCK // 8:
        return np.matmul(e_adjoint, a.astype(dtype, copy=False), out=out)  # p r [m] n
    block = _PROJECTED_BLOCK if a.dtype == dtype else _PROJECTED_BLOCK // 8  # a converted block is held twice
    columns, block_slabs = max(1, min(n, block // m)), max(1, block // (m * n))

    def multiply(slab: tuple[int, int], column: tuple[int, int]) -> None:
        for p in range(*slab, block_slabs):
            for k in range(*column, columns):
                part = slice(p, min(p + block_slabs, slab[1])), slice(None), slice(k, min(k + columns, column[1]))
                np.matmul(e_adjoint, a[part].astype(dtype, copy=False), out=out[part])  # p r [m] n

    parts = thread_count() if a.size > _PROJECTED_BLOCK else 1
    if slabs > 1:
        run_parallel(multiply, [(slab, (0, n)) for slab in split_range(slabs, parts)])
    else:
        run_parallel(multiply, [((0, 1), column) for column in split_range(n, parts, multiple=8)])
    return out


def project(e: Array, a: Array, *, size: float | None = None, negligible: float) -> tuple[Array, float]:
    """Return e^H a (r, n) of `a` (m, n) and `e` (m, r) with orthonormal columns, and norm(a - e e^H a).

    The projection and its error are orthogonal, so the square of the error is the difference of two squares. Where that
    is not above roundoff the error is measured instead, unless roundoff is `negligible`. `size` is the norm of `a` if
    it is known.
    """
    projected = adjoint_times(e, a.reshape(1, *a.shape)).reshape(e.shape[1], -1)  # r [m] n
    error = projection_error((norm(a) if size is None else size) ** 2, norm(projected) ** 2, negligible)
    return projected, residual_norm(a, e, projected) if error is None else error


def projection_error(square: float, kept: float, negligible: float) -> float | None:
    """Return the error of a projection of a matrix, from the squares of the norms of both.

    None where their difference is not above roundoff, unless roundoff is `negligible`.
    """
    difference = max(0.0, square - kept) + _ROUNDING * square
    resolved = difference > _DIFFERENCE * square or math.sqrt(_DIFFERENCE * square) <= negligible
    return math.sqrt(difference) if resolved else None


def residual_norm(a: Array, left: Array, right: Array) -> float:
    """Return norm(a - left @ right) of `a` (m, n), `left` (m, r) and `right` (r, n), in blocks of columns."""
    step = max(1, _PROJECTED_BLOCK // len(a))
    parts = []
    for k in range(0, a.shape[1], step):
        parts.append(norm(a[:, k : k + step] - parallel_matmul(left, right[:, k : k + step])))  # m [r] n
    return norm(np.array(parts))
