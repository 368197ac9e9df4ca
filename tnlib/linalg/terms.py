"""Many matrices as the columns of one: each as it is, or as the product of two factors that stays one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.scale import exponent, largest, shift

Factors = tuple[Array, ...]  # (m, n); or (m, r) and (r, n)

_BLOCK = 1 << 20  # entries that are multiplied out at a time


def terms_triangle(matrices: Sequence[Factors]) -> Array:
    """Return t (k, H), t^H t the Gram matrix of the inner products of H matrices of one shape.

    It is the triangular factor of the matrix whose columns they are, flattened. Of that matrix a block of rows exists
    at a time: squares, as in the Gram matrix itself, would lose what is smaller than sqrt(eps).
    """
    if all(len(factors) == 2 for factors in matrices):
        matrices = _narrowed(matrices)
    t = np.zeros((0, len(matrices)), matrices[0][0].dtype)
    for _, rows in _in_blocks(matrices):
        t = triangle(np.concatenate([t, rows.reshape(len(rows), -1).T]))  # k h
    return t


def combine(coefficients: Array, matrices: Sequence[Factors]) -> list[Factors]:
    """Return the sums over h of coefficients[k, h] times matrix h, as factors where that is fewer numbers."""
    m, n = matrices[0][0].shape[0], matrices[0][-1].shape[1]
    if all(len(factors) == 2 for factors in matrices) and sum(len(r) for _, r in matrices) * (m + n) < m * n:
        left, right = np.concatenate([l for l, _ in matrices], axis=1), np.concatenate([r for _, r in matrices])
        spread = np.repeat(coefficients, [len(r) for _, r in matrices], axis=1)  # k (h r)
        return [(left * row, right) for row in spread]
    out = [np.empty((m, n), np.result_type(coefficients, matrices[0][0])) for _ in coefficients]
    for block, rows in _in_blocks(matrices):
        for sums, found in zip(out, np.tensordot(coefficients, rows, 1), strict=True):  # k [h] m n
            sums[block] = found
    return [(sums,) for sums in out]


def terms_in_range(left: Array, right: Sequence[Factors]) -> tuple[Array, list[Factors], int]:
    """Return the terms of sum_h left[h] (x) right[h] in range, of one dtype, and e: the sum is 2**e times smaller."""
    dtype = np.result_type(left, *(a for factors in right for a in factors))
    scaled: list[list[Array]] = []
    twos: list[int | None] = []  # None: the term is zero
    for a, factors in zip(left, right, strict=True):
        parts = [part.astype(dtype, copy=False) for part in (a, *factors)]
        exponents = [exponent(part) for part in parts]
        scaled.append([shift(part, -e) for part, e in zip(parts, exponents, strict=True)])
        twos.append(sum(exponents) if all(largest(part) > 0 for part in parts) else None)
    top = max((e for e in twos if e is not None), default=0)
    first = [shift(parts[0], 0 if e is None else e - top) for parts, e in zip(scaled, twos, strict=True)]
    return np.stack(first), [tuple(parts[1:]) for parts in scaled], top


def _narrowed(matrices: Sequence[Factors]) -> list[Factors]:
    """Return smaller factors of the same inner products: [l_1 l_2 ...] = Q T, and the same on the right."""
    (m, _), (_, n), ends = matrices[0][0].shape, matrices[0][1].shape, np.cumsum([len(r) for _, r in matrices])
    left, right = [l for l, _ in matrices], [r for _, r in matrices]
    if ends[-1] < m:
        left = np.split(triangle(np.concatenate(left, axis=1)), ends[:-1], axis=1)  # (h r) r
    if ends[-1] < n:
        right = [r.T for r in np.split(triangle(np.concatenate(right).T), ends[:-1], axis=1)]  # r (h r)
    return list(zip(left, right, strict=True))


def _in_blocks(matrices: Sequence[Factors]) -> Iterator[tuple[slice, Array]]:
    """Yield a few rows of all matrices at a time: which, and (h, rows, n)."""
    m, n = matrices[0][0].shape[0], matrices[0][-1].shape[1]
    step = max(1, _BLOCK // (len(matrices) * n))
    for start in range(0, m, step):
        block = slice(start, start + step)
        yield block, np.stack([f[0][block] @ f[1] if len(f) == 2 else f[0][block] for f in matrices])
