"""Solving with Gram matrices, singular ones too."""

from __future__ import annotations

import numpy as np
from scipy.linalg import eigh, get_lapack_funcs

from tnlib._typing import Array


def solve_gram(projected: Array, gram: Array) -> Array:
    """Return `projected` (n, R) times the pseudo-inverse of `gram` (R, R), Hermitian and positive semidefinite.

    Cholesky is several times faster than the eigenvectors and as good, unless the matrix is singular to roundoff,
    as over-ranked and collinear factors make it; its estimate of the condition number tells.
    """
    potrf, potrs, pocon = get_lapack_funcs(("potrf", "potrs", "pocon"), (gram,))
    eps = float(np.finfo(gram.dtype).eps)
    triangle, failed = potrf(gram, lower=False, clean=False)
    if not failed:
        reciprocal_condition, _ = pocon(triangle, np.linalg.norm(gram, 1))
        if reciprocal_condition > 10 * len(gram) * eps:
            solution, _ = potrs(triangle, projected.conj().T)  # Hermitian: x gram = p is gram x^H = p^H
            return np.ascontiguousarray(solution.conj().T)
    values, vectors = eigh(gram, check_finite=False)
    floor = len(values) * eps * max(float(values[-1]), 0.0)
    inverse = np.where(values > floor, 1 / np.where(values > floor, values, 1), 0)
    solved: Array = ((projected @ vectors) * inverse) @ vectors.conj().T
    return solved


def leading_eigenvectors(gram: Array, count: int) -> Array:
    """Return (n, count) orthonormal eigenvectors of the largest eigenvalues of a Hermitian matrix, largest first."""
    n = len(gram)
    vectors: Array = eigh(gram, check_finite=False, subset_by_index=(n - count, n - 1))[1]
    return vectors[:, ::-1]
