"""Linear combinations and inner products of many matrices, each one array or a product of two factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import largest, rescale, shift

Factors: TypeAlias = tuple[Array, ...]  # (m, n); or (m, r) and (r, n)

_BLOCK = 1 << 20  # entries that are multiplied out at a time


def gram_factor(matrices: Sequence[Factors]) -> Array:
    """Return t (k, H) with t^H t the Gram matrix of the Frobenius inner products of H matrices of one shape.

    It is the triangular factor of the matrix that has the flattened matrices as columns, of which a block of rows
    exists at a time. The Gram matrix itself would lose singular values below sqrt(eps).
    """
    if all(len(factors) == 2 for factors in matrices):
        matrices = _compressed(matrices)
    t = np.zeros((0, len(matrices)), matrices[0][0].dtype)
    for _, rows in _in_blocks(matrices):
        t = r_factor(np.concatenate([t, rows.reshape(len(rows), -1).T]))  # k h
    return t


def combine(coefficients: Array, matrices: Sequence[Factors]) -> list[Factors]:
    """Return the sums over h of coefficients[k, h] times matrix h, as factors where that is fewer numbers."""
    m, n = matrices[0][0].shape[0], matrices[0][-1].shape[1]
    if all(len(factors) == 2 for factors in matrices) and sum(len(r) for _, r in matrices) * (m + n) < m * n:
        left, right = np.concatenate([l for l, _ in matrices], axis=1), np.concatenate([r for _, r in matrices])
        repeated = np.repeat(coefficients, [len(r) for _, r in matrices], axis=1)  # k (h r)
        return [(left * row, right) for row in repeated]
    out = [np.empty((m, n), np.result_type(coefficients, matrices[0][0])) for _ in coefficients]
    for block, rows in _in_blocks(matrices):
        for total, part in zip(out, np.tensordot(coefficients, rows, 1), strict=True):  # k [h] m n
            total[block] = part
    return [(total,) for total in out]


def rescale_terms(left: Array, right: Sequence[Factors]) -> tuple[Array, list[Factors], int]:
    """Return the terms of sum_h left[h] (x) right[h] in range, of one dtype, and e: the sum is 2**e times smaller."""
    dtype = np.result_type(left, *(a for factors in right for a in factors))
    terms = [
        [rescale(part.astype(dtype, copy=False)) for part in (a, *factors)]
        for a, factors in zip(left, right, strict=True)
    ]
    exponents = [sum(part.exponent for part in term) for term in terms]
    is_zero = [any(largest(part.array) == 0.0 for part in term) for term in terms]
    top = max((e for e, zero in zip(exponents, is_zero, strict=True) if not zero), default=0)
    first = [
        term[0].array if zero else shift(term[0].array, e - top)
        for term, e, zero in zip(terms, exponents, is_zero, strict=True)
    ]
    return np.stack(first), [tuple(part.array for part in term[1:]) for term in terms], top


def multiply_factors(factors: Factors) -> Array:
    """Return the matrix (m, n) of one array or two factors."""
    return factors[0] @ factors[1] if len(factors) == 2 else factors[0]


def _compressed(matrices: Sequence[Factors]) -> list[Factors]:
    """Return smaller factors with the same inner products: [l_1 l_2 ...] = Q T, and the same on the right."""
    (m, _), (_, n), ends = matrices[0][0].shape, matrices[0][1].shape, np.cumsum([len(r) for _, r in matrices])
    left, right = [l for l, _ in matrices], [r for _, r in matrices]
    if ends[-1] < m:
        left = np.split(r_factor(np.concatenate(left, axis=1)), ends[:-1], axis=1)  # (h r) r
    if ends[-1] < n:
        right = [r.T for r in np.split(r_factor(np.concatenate(right).T), ends[:-1], axis=1)]  # r (h r)
    return list(zip(left, right, strict=True))


def _in_blocks(matrices: Sequence[Factors]) -> Iterator[tuple[slice, Array]]:
    """Yield a few rows of all matrices at a time: the slice of rows, and the array (h, rows, n)."""
    m, n = matrices[0][0].shape[0], matrices[0][-1].shape[1]
    step = max(1, _BLOCK // (len(matrices) * n))
    for start in range(0, m, step):
        block = slice(start, start + step)
        yield block, np.stack([multiply_factors((f[0][block], *f[1:])) for f in matrices])
