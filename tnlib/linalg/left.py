"""Left singular vectors and singular values of long matrices, from Gram matrices."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import gram
from tnlib.linalg.svd import thin_svd

_SHORT = 1 << 13  # entries; a decomposition of fewer costs no more than a Gram matrix
_BLOCK = 1 << 21  # entries that are rotated at a time


class Left(NamedTuple):
    """What a truncation from the left needs of a matrix: u diag(s) stands in for it, its right space apart."""

    u: Array  # (m, k), orthonormal columns
    s: Array  # (k,), descending
    blur: float  # norms of tails are right to this much, in the sense tail^2 +- blur^2


def left_svd(a: Array, *, exact: bool) -> Left:
    r"""Return left singular vectors and values of the unfolding of `a` (p, m, n) with rows m.

    A truncation from the left sees a matrix A only through A A^H, which a Gram matrix G of size m holds. Its
    eigenvalues are squares, so G rounds singular values below sqrt(eps) of the largest away: tails are blurred by
    sqrt(4 m eps) of the norm at most. With `exact` there is a second Gram matrix, in the eigenbasis Q of the first one,

        G = Q L Q^H,    H = (Q^H A) (Q^H A)^H = D C D,    C = Z M Z^H,    A A^H = X X^H  with  X = Q D Z sqrt(M),

    where D holds the lengths of the rows of Q^H A. Those rows are nearly orthogonal, large and small ones apart, so
    that every entry of H is right to eps times the lengths of its two rows; scaled to a unit diagonal it loses
    nothing more, and the singular values of X are as good as those of a QR or an SVD of A itself. All the work that
    grows with n is done by two Gram matrices and one product.
    """
    slabs, m, n = a.shape
    if m > slabs * n or (exact and (a.size < _SHORT or 2 * m > slabs * n)):
        flat = a.transpose(1, 0, 2).reshape(m, -1)  # m (p n)
        u, s, _ = thin_svd(flat)
        return Left(u, s, 0.0)
    values, vectors = np.linalg.eigh(gram(a))
    if exact:
        vectors, s = _in_its_eigenbasis(a, vectors)
        return Left(vectors, s, 0.0)
    s = np.sqrt(np.maximum(values[::-1], 0.0))
    blur = math.sqrt(4 * m * np.finfo(np.float64).eps) * float(np.linalg.norm(s))
    return Left(vectors[:, ::-1], s, blur)


def _in_its_eigenbasis(a: Array, basis: Array) -> tuple[Array, Array]:
    """Return left singular vectors and values of `a` (p, m, n) by a Gram matrix in an orthonormal basis (m, m)."""
    slabs, m, n = a.shape
    adjoint = np.ascontiguousarray(basis.conj().T)
    total = np.zeros_like(basis)
    step, together = max(1, _BLOCK // m), max(1, _BLOCK // (m * n))
    for p in range(0, slabs, together):
        for k in range(0, n, step):
            block = a[p : p + together, :, k : k + step].transpose(1, 0, 2).reshape(m, -1)  # m (p n)
            total += gram((adjoint @ block)[None])
    lengths = np.sqrt(np.maximum(np.diagonal(total).real, 0.0))
    units = np.where(lengths > 0, lengths, 1.0)
    values, vectors = np.linalg.eigh(total / np.multiply.outer(units, units))
    root = lengths[:, None] * vectors * np.sqrt(np.maximum(values, 0.0))
    u, s, _ = thin_svd(basis @ root)
    # Where values cluster, divide and conquer leaves columns orthogonal to a thousand eps; a Newton step mends that.
    return u @ (1.5 * np.eye(m) - 0.5 * (u.conj().T @ u)), s
