"""Linear systems and eigenvectors of Gram matrices, singular ones included; least squares of tall systems."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array


def solve_gram(projected: Array, gram: Array) -> Array:
    """Return `projected` (n, R) times the pseudo-inverse of `gram` (R, R), Hermitian and positive semidefinite.

    Elimination is several times faster than an eigendecomposition, and as accurate unless the matrix is singular to
    roundoff, as with collinear factors or a rank that is too high. The diagonal of the Cholesky factor is the test.
    """
    eps = float(np.finfo(gram.dtype).eps)
    try:
        diagonal = np.diagonal(np.linalg.cholesky(gram)).real
        regular = float(diagonal.min() / diagonal.max()) ** 2 > 100 * len(gram) * eps
    except np.linalg.LinAlgError:
        regular = False
    if regular:  # x gram = p is gram x^H = p^H
        return np.ascontiguousarray(np.linalg.solve(gram, projected.conj().T).conj().T)
    values, vectors = np.linalg.eigh(gram)
    floor = len(values) * eps * max(float(values[-1]), 0.0)
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
