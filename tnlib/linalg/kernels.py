"""Kernels compiled by numba, without validation or options: dot products and products of rows.

BLAS is optimized for large square products. For few rows, each very long, it runs far below its peak speed, and it
needs copies of single precision and of slabs. Dot products along contiguous rows need no transposed copies, and a tile
of 4 x 4 of them does 16 multiplications for 8 numbers loaded, enough to be bound by arithmetic. The module is loaded
for large arrays only.
"""

from __future__ import annotations

import functools
import math
import types
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np

from tnlib._typing import Array

F = TypeVar("F", bound=Callable[..., Any])
Rows: TypeAlias = tuple[Array, ...]  # of one matrix and one length

_FLAGS = 0x1 | 0x2 | 0x100 | 0x400  # of numpy: C order, Fortran order, aligned, writeable
# Sums may be taken in any order, which is what lets them run in vector registers. NaN and inf keep their meaning.
_SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


def kernel(function: F) -> F:
    """Return `function` compiled at the first call with each combination of argument types; safe to share by threads.

    Numba's own threads are not used: not all of its threading layers can be entered from two Python threads at once,
    or after a fork, and a caller may do either.

    Every combination of types gets a name, and so a file in the cache, of its own. Numba would number the types of one
    function in the order of its calls, so that two processes that compile for different types at the same time would
    use the same number.
    """
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
    known: dict[Any, Callable[..., Any]] = {}  # by what is read of arguments faster than their types

    @functools.wraps(function)
    def call(*arguments: Any) -> None:
        layout = _layout(arguments)
        if layout not in known:
            kinds = tuple(map(numba.typeof, arguments))
            if kinds not in compiled:  # numba has a lock under which the first call compiles
                compiled.setdefault(kinds, _compile(function, "_".join(map(str, kinds))))
            known[layout] = compiled[kinds]
        known[layout](*arguments)

    call.compiled = compiled  # type: ignore[attr-defined]  # to inspect the compiled functions and their cache
    return cast(F, call)


def _layout(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the numba types of arguments depend on: of an array dtype, legs, memory order, write access."""
    layout: list[Any] = []
    for a in arguments:
        if isinstance(a, np.ndarray):
            layout.append((a.dtype, a.ndim, a.flags.num & _FLAGS))
        else:
            layout.append(_layout(a) if isinstance(a, tuple) else type(a))
    return tuple(layout)


def inlined(function: F) -> F:
    """Return `function` for inlining into kernels."""
    return cast(F, numba.njit(function, inline="always", fastmath=_SUMS_IN_ANY_ORDER))


def _compile(function: Callable[..., Any], kinds: str) -> Callable[..., Any]:
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__qualname__ = f"{function.__name__}_{zlib.crc32(kinds.encode()):08x}"
    copy.__module__ = function.__module__
    try:
        return numba.njit(copy, cache=True, nogil=True, fastmath=_SUMS_IN_ANY_ORDER)
    except RuntimeError:  # no folder is writable: every process compiles anew
        return numba.njit(copy, nogil=True, fastmath=_SUMS_IN_ANY_ORDER)


@inlined
def _tile(x: Rows, y: Rows, out: Array, i: int, j: int) -> None:
    """Add the dot products of four rows with four rows, all of one length, to out[i:i+4, j:j+4]."""
    (x0, x1, x2, x3), (y0, y1, y2, y3) = x, y
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = 0.0
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = 0.0
    for k in range(len(x0)):  # sixteen sums in registers
        a0, a1, a2, a3 = x0[k], x1[k], x2[k], x3[k]
        b0, b1, b2, b3 = y0[k], y1[k], y2[k], y3[k]
        s00, s01, s02, s03 = s00 + a0 * b0, s01 + a0 * b1, s02 + a0 * b2, s03 + a0 * b3
        s10, s11, s12, s13 = s10 + a1 * b0, s11 + a1 * b1, s12 + a1 * b2, s13 + a1 * b3
        s20, s21, s22, s23 = s20 + a2 * b0, s21 + a2 * b1, s22 + a2 * b2, s23 + a2 * b3
        s30, s31, s32, s33 = s30 + a3 * b0, s31 + a3 * b1, s32 + a3 * b2, s33 + a3 * b3
    for row, sums in enumerate(
        ((s00, s01, s02, s03), (s10, s11, s12, s13), (s20, s21, s22, s23), (s30, s31, s32, s33))
    ):
        for column in range(4):
            out[i + row, j + column] += sums[column]


@kernel
def add_gram(a: Array, slabs: tuple[int, int], columns: tuple[int, int], width: int, out: Array) -> None:
    """Add the sum over p in `slabs` and k in `columns` of a[p, i, k] * a[p, j, k] to out[i, j], tiles with i <= j.

    Blocks of `width` columns are copied into rows of float64 whose stride is no power of two: in the array itself it
    often is, and then all rows map to the same few cache lines.
    """
    m = a.shape[1]
    padded = out.shape[0]  # m rounded up to a multiple of four
    block, part = np.zeros((padded, width + 8)), np.zeros_like(out)
    filled, blocks = 0, 0
    for p in range(slabs[0], slabs[1]):
        k = columns[0]
        while k < columns[1]:
            w = min(width - filled, columns[1] - k)
            for i in range(m):
                source, target = a[p, i, k : k + w], block[i, filled : filled + w]
                for c in range(w):
                    target[c] = source[c]
            filled += w
            k += w
            if filled == width or (p == slabs[1] - 1 and k == columns[1]):
                b = block[:, :filled]
                for i in range(0, padded, 4):
                    for j in range(i, padded, 4):
                        _tile((b[i], b[i + 1], b[i + 2], b[i + 3]), (b[j], b[j + 1], b[j + 2], b[j + 3]), part, i, j)
                filled, blocks = 0, blocks + 1
                if blocks % 64 == 0:  # sums of sums: equal terms would all round in the same direction
                    out += part
                    part[:] = 0.0
    out += part


@kernel
def times_rows(a: Array, b: Array, width: int, out: Array) -> None:
    """Add a (m, n) times the transpose of b (l, n) to out (m, l); m and l are multiples of four."""
    m, n = a.shape
    for k in range(0, n, width):  # the block of b stays in cache
        e = min(k + width, n)
        for i in range(0, m, 4):
            for j in range(0, len(b), 4):
                x = a[i, k:e], a[i + 1, k:e], a[i + 2, k:e], a[i + 3, k:e]
                y = b[j, k:e], b[j + 1, k:e], b[j + 2, k:e], b[j + 3, k:e]
                _tile(x, y, out, i, j)


@kernel
def times_chosen(
    rows: Array, tables: Array, chosen: Array, scaling: tuple[float, float], out: Array, exponents: Array
) -> None:
    """Write row i of `rows` (N, l) times tables[chosen[i]] (l, r) to out[i]; tables (n, l, r).

    Where the largest part of a result leaves the range of `scaling`, a power of two is moved to `exponents`.
    """
    low, high = scaling
    for i in range(len(rows)):
        table, product = tables[chosen[i]], out[i]
        product[:] = 0
        for k in range(rows.shape[1]):
            factor = rows[i, k]
            for j in range(len(product)):
                product[j] += factor * table[k, j]
        largest = 0.0
        for j in range(len(product)):
            largest = max(largest, abs(product[j].real), abs(product[j].imag))
        if largest > high or 0.0 < largest < low:
            e = math.frexp(largest)[1]
            for j in range(len(product)):
                product[j] *= 2.0**-e
            exponents[i] += e
