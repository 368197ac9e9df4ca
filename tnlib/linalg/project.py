"""Long matrices projected from the left on a few orthonormal columns, and what the projection loses."""

from __future__ import annotations

import math

import numpy as np

from tnlib._typing import Array
from tnlib.linalg import threads
from tnlib.linalg.gram import KERNEL_WORK
from tnlib.linalg.scale import norm

_DIFFERENCE = 1e-11  # a difference of squares above this part of them is right to a few parts in a thousand
_ROUNDING = 1e-14  # of the squares
_BLOCK = 1 << 20  # entries
_TALL = 1024  # rows from which the kernel is faster than BLAS
_KERNEL_BLOCK = (64, 512)  # rows and columns


def adjoint_times(e: Array, a: Array) -> Array:
    """Return e^H a[p] for every p, (p, r, n) in double precision, of `e` (m, r) and `a` (p, m, n)."""
    slabs, m, n = a.shape
    adjoint = np.ascontiguousarray(e.conj().T, np.result_type(e, np.float64))
    out = np.empty((slabs, len(adjoint), n), np.result_type(adjoint, a))
    if slabs == 1 and m >= _TALL and m * out.size >= KERNEL_WORK and not np.iscomplexobj(out):
        return _of_tall(adjoint, a[0])[None]
    block = _BLOCK if a.dtype == out.dtype else _BLOCK // 8  # what is converted is held twice
    step, together = max(1, min(n, block // m)), max(1, block // (m * n))

    def multiply(slab: tuple[int, int], column: tuple[int, int]) -> None:
        for p in range(*slab, together):
            for k in range(*column, step):
                part = slice(p, min(p + together, slab[1])), slice(None), slice(k, min(k + step, column[1]))
                np.matmul(adjoint, a[part].astype(out.dtype, copy=False), out=out[part])

    parts = threads.count() if slabs * m * n > _BLOCK else 1
    if slabs > 1:
        threads.spread(multiply, [(slab, (0, n)) for slab in threads.cut(slabs, parts)])
    else:
        threads.spread(multiply, [((0, 1), column) for column in threads.cut(n, parts, multiple=8)])
    return out


def _of_tall(adjoint: Array, a: Array) -> Array:
    from tnlib.kernels.rows import add_combinations

    rows = len(a) // 8 * 8
    parts = threads.cut(rows, threads.count(), multiple=8)
    sums = np.zeros((len(parts), len(adjoint), a.shape[1]))
    pieces = [(adjoint[:, i:j], a[i:j], *_KERNEL_BLOCK, out) for (i, j), out in zip(parts, sums, strict=True)]
    threads.spread(add_combinations, pieces)
    return np.asarray(sums.sum(axis=0) + adjoint[:, rows:] @ a[rows:])


def project(e: Array, a: Array, *, size: float | None = None, negligible: float) -> tuple[Array, float]:
    """Return e^H a (r, n) of `a` (m, n) and `e` (m, r) with orthonormal columns, and norm(a - e e^H a).

    What is projected away is orthogonal to what is left, so its square is the difference of two squares. Where
    that would be rounding errors it is measured instead, unless even they are `negligible`. `size` is the norm of
    `a` if it is known.
    """
    left = adjoint_times(e, a[None])[0]
    whole = (norm(a) if size is None else size) ** 2
    difference = max(0.0, whole - norm(left) ** 2) + _ROUNDING * whole
    if difference > _DIFFERENCE * whole or math.sqrt(_DIFFERENCE * whole) <= negligible:
        return left, math.sqrt(difference)
    return left, residual_norm(a, e, left)


def residual_norm(a: Array, left: Array, right: Array) -> float:
    """Return norm(a - left @ right) of `a` (m, n), `left` (m, r) and `right` (r, n), some columns at a time."""
    step = max(1, _BLOCK // len(a))
    parts = []
    for k in range(0, a.shape[1], step):
        parts.append(norm(a[:, k : k + step] - threads.matmul(left, right[:, k : k + step])))
    return norm(np.array(parts))
