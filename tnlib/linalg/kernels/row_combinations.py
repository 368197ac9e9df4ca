"""Linear combinations of the rows of a tall matrix, eight at a time."""

from __future__ import annotations

from tnlib._typing import Array
from tnlib.linalg.kernels.compile import inlined, kernel


@inlined
def _add_eight(
    y: Array, x0: Array, x1: Array, x2: Array, x3: Array, x4: Array, x5: Array, x6: Array, x7: Array, c: Array
) -> None:
    """Add c[0] x0 + ... + c[7] x7 to y, rows of one length."""
    c0, c1, c2, c3, c4, c5, c6, c7 = c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]
    for k in range(len(y)):
        first = c0 * x0[k] + c1 * x1[k] + c2 * x2[k] + c3 * x3[k]
        second = c4 * x4[k] + c5 * x5[k] + c6 * x6[k] + c7 * x7[k]
        y[k] += first + second


@kernel
def add_combinations(e: Array, a: Array, rows: int, width: int, out: Array) -> None:
    """Add e (r, m) times a (m, n) to out (r, n); m and `rows` are multiples of eight.

    For each block of `rows` rows and `width` columns all sums are computed while the block and its part of `out` are in
    the first two caches.
    """
    m, n = a.shape
    for first in range(0, m, rows):
        for k in range(0, n, width):
            z = min(k + width, n)
            for i in range(first, min(first + rows, m), 8):
                x0, x1, x2, x3 = a[i, k:z], a[i + 1, k:z], a[i + 2, k:z], a[i + 3, k:z]
                x4, x5, x6, x7 = a[i + 4, k:z], a[i + 5, k:z], a[i + 6, k:z], a[i + 7, k:z]
                for j in range(len(e)):
                    _add_eight(out[j, k:z], x0, x1, x2, x3, x4, x5, x6, x7, e[j, i : i + 8])
