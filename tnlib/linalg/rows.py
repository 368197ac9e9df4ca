"""An orthonormal basis of the rows of a matrix, and what is left of the matrix without it."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import gram
from tnlib.linalg.scale import norm

_SHORT = 1 << 12  # entries; a QR of fewer costs no more than a Gram matrix
_CLEAR = 1e-6  # of the largest singular value: directions above are orthogonal to a part in ten thousand
_ROUNDOFF = 8  # eps sqrt(rows) of the norm: what the products here cannot tell from zero


def row_basis(a: Array) -> tuple[Array, Array]:
    """Return l (m, k) and q (k, n), q with orthonormal rows, so that a = l q to roundoff; k is at most the rank.

    In the eigenbasis of the Gram matrix the rows are nearly orthogonal, and a Cholesky factor of their own Gram matrix
    puts right what is missing. Directions that the Gram matrix does not resolve are measured there: where they hold
    more than roundoff, a QR is needed. For matrices of a few dozen rows this is three times as fast as the QR.
    """
    m, n = a.shape
    if a.size >= _SHORT and 2 * m <= n:
        total = gram(a[None])
        sizes = np.sqrt(np.maximum(np.diagonal(total).real, 0.0))
        sizes = np.where(sizes > 0, sizes, 1.0)
        # Rows of length one: what is faint is told row by row, as by a QR, for what stands on their left may be large.
        values, vectors = np.linalg.eigh(total / np.multiply.outer(sizes, sizes))
        s = np.sqrt(np.maximum(values, 0.0))
        faint = int(np.count_nonzero(s <= _CLEAR * s[-1]))
        if faint < m:
            turned = (vectors / sizes[:, None]).conj().T.astype(a.dtype, copy=False) @ a  # m n
            roundoff = _ROUNDOFF * np.finfo(a.dtype).eps * np.sqrt(m) * s[-1]
            if faint == 0 or norm(turned[:faint]) <= roundoff:
                lengths = s[faint:].astype(a.real.dtype, copy=False)
                rough = turned[faint:] / lengths[:, None]
                lower = np.linalg.cholesky(rough @ rough.conj().T)
                left = (sizes[:, None] * vectors[:, faint:]).astype(a.dtype, copy=False) * lengths
                return left @ lower, np.linalg.inv(lower) @ rough
    q, r = np.linalg.qr(a.conj().T)
    return r.conj().T, q.conj().T


def row_factor(a: Array) -> Array:
    """Return l (m, k) with l l^H = a a^H to roundoff, as a = l q with orthonormal rows of a q that is not made.

    A QR without pivots finds the rows of a deficient matrix dependent one by one, and what it then puts into its
    triangle is roundoff: a row of the triangle goes where, of every row of `a`, it holds no more than that.
    """
    r = np.linalg.qr(a.conj().T, mode="r")  # k m
    size = np.abs(r)
    lengths = np.sqrt(np.square(size).sum(axis=0))
    kept = (size > _ROUNDOFF * np.finfo(a.dtype).eps * np.sqrt(len(a)) * lengths).any(axis=1)
    kept[0] = True
    return np.asarray(r[kept].conj().T)
