"""Multilinear algebra: mode products, unfoldings, Khatri-Rao products, linear systems of their Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._array_api import eps, permute, tensordot
from tnlib._typing import Array


def mode_product(x: Array, matrix: Array, mode: int) -> Array:
    """Return the product of `matrix` (m, n) with leg `mode` of `x`, whose size n becomes m."""
    out = tensordot(matrix, x, ((1,), (mode,)))  # m [n] ...
    return permute(out, (*range(1, mode + 1), 0, *range(mode + 1, x.ndim)))  # type: ignore[no-any-return]


def unfold(x: Array, mode: int) -> Array:
    """Return the mode unfolding of `x`, a matrix (n[mode], product of the other sizes)."""
    return np.moveaxis(x, mode, 0).reshape(x.shape[mode], -1)


def matrix_from(x: Array, legs: Sequence[int]) -> Array:
    """Return `x` as the matrix (other legs, `legs`), which maps the group `legs` to all others."""
    columns = math.prod(x.shape[k] for k in legs)
    return np.moveaxis(x, legs, range(-len(legs), 0)).reshape(-1, columns)


def matrix_onto(x: Array, legs: Sequence[int]) -> Array:
    """Return `x` as the matrix (`legs`, other legs), which maps all others to the group `legs`."""
    rows = math.prod(x.shape[k] for k in legs)
    return np.moveaxis(x, legs, range(len(legs))).reshape(rows, -1)


def khatri_rao(factors: Sequence[Array]) -> Array:
    """Return the column-wise Kronecker product (n[0] n[1] ..., R) of factors (n[k], R)."""
    out = factors[0]
    for factor in factors[1:]:
        out = (out[:, None, :] * factor[None, :, :]).reshape(-1, factor.shape[1])  # (n0 ... nk) R
    return out


def contract_columns(x: Array, factors: Sequence[Array], mode: int) -> Array:
    """Return `x` (n[0], n[1], ..., R) summed over all legs but `mode`, (n[mode], R).

    Column j of the result is the contraction of x[..., j] with the j-th columns of the other factors (n[k], R).
    """
    y = x
    for factor in factors[:mode:-1]:
        y = np.einsum("...jr,jr->...r", y, factor)  # n0 ... [nj] R
    for factor in factors[:mode]:
        y = np.einsum("i...r,ir->...r", y, factor)  # [ni] ... R
    return y


def solve_gram(projected: Array, gram: Array) -> Array:
    """Return `projected` (n, R) times the pseudo-inverse of `gram` (R, R), Hermitian and positive semidefinite.

    Elimination is several times faster than an eigendecomposition, and as accurate unless the matrix is singular to
    roundoff, as with collinear factors or a rank that is too high. The diagonal of the Cholesky factor is the test.
    """
    roundoff = eps(gram.dtype)
    try:
        diagonal = np.linalg.cholesky(gram).diagonal().real.tolist()
        regular = (min(diagonal) / max(diagonal)) ** 2 > 100 * len(gram) * roundoff
    except np.linalg.LinAlgError:
        regular = False
    if regular:  # x gram = p is gram x^H = p^H
        return np.ascontiguousarray(np.linalg.solve(gram, projected.conj().T).conj().T)
    values, vectors = np.linalg.eigh(gram)
    floor = len(values) * roundoff * max(float(values[-1]), 0.0)
    inverse = np.where(values > floor, 1 / np.where(values > floor, values, 1), 0)
    solved: Array = ((projected @ vectors) * inverse) @ vectors.conj().T
    return solved


def solve_damped(matrix: Array, damping: float, right: Array) -> Array:
    """Return (matrix + damping * 1)^-1 right, of a square `matrix` (n, n) and `right` (n,)."""
    shifted = matrix.copy()
    shifted[np.diag_indices_from(shifted)] += damping
    return np.asarray(np.linalg.solve(shifted, right))


def solve_tall(a: Array, b: Array) -> Array:
    """Return the least-squares solution x (k, n) of a x = b, of `a` (l, k) with independent columns and `b` (l, n)."""
    q, r = np.linalg.qr(a)
    return np.asarray(np.linalg.solve(r, q.conj().T @ b))  # k [l] n


def leading_eigenvectors(gram: Array, count: int) -> Array:
    """Return (n, count) orthonormal eigenvectors of the largest eigenvalues of a Hermitian matrix, largest first."""
    vectors: Array = np.linalg.eigh(gram)[1][:, ::-1]
    return vectors[:, :count]
