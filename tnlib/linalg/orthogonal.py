"""Orthogonal factorizations: QR, orthonormal rows, orthonormal completion, and the test for isometries."""

from __future__ import annotations

import math

import numpy as np

from tnlib._array_api import adjoint, from_host, namespace, records_gradient, to_host
from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.canonical_basis import leading_phases, unit_phases
from tnlib.linalg.gram import gram
from tnlib.linalg.scaling import norm

# Rows, columns, and columns per row of real matrices from which the Gram matrix takes 0.4 to 0.85 of the time of QR on
# one thread; it takes 1.0 to 1.2 for 64 x 1024, 1.5 for 32 x 512, and for complex 128 x 2048 as much as the QR.
_LEAST_ROWS, _LEAST_COLUMNS, _LEAST_RATIO = 64, 2048, 16
_RESOLVED = 1e-6  # of the largest singular value: directions above are orthogonal to a part in ten thousand
_ROUNDOFF = 8  # eps sqrt(rows) of the norm: roundoff of the products below
_ISOMETRIC = 1e4  # eps sqrt(columns)
_SINGULAR = 1e4  # eps, of the largest diagonal of a triangular factor


def qr_positive(a: Array) -> tuple[Array, Array]:
    """Return q (m, k) isometric and r (k, n) with a real, non-negative diagonal; k = min(m, n).

    Here and below, arrays of other libraries than numpy are factorized by their own QR.
    """
    if isinstance(a, np.ndarray):
        q, r = np.linalg.qr(a)
        phases = unit_phases(r.diagonal())
        return q * phases, phases.conj()[:, None] * r
    xp = namespace(a)
    q, r = xp.linalg.qr(a)
    diagonal = to_host(xp.linalg.diagonal(r))
    if records_gradient(a):
        _refuse_singular(diagonal)
    phases = unit_phases(diagonal)
    return q * from_host(phases, a), from_host(phases.conj(), a)[:, None] * r


def _refuse_singular(diagonal: Array) -> None:
    """Raise where a triangular factor is singular to roundoff: the gradient of its QR is not defined."""
    sizes = np.abs(diagonal)
    if sizes.min() <= _SINGULAR * np.finfo(sizes.dtype).eps * sizes.max():
        raise ArgumentError(
            "round, apply and canonicalize: bonds of a train with a gradient must not exceed its ranks, got a singular "
            "core; round it under torch.no_grad() first."
        )


def r_factor(a: Array) -> Array:
    """Return r (k, n) with r^H r = a^H a, k = min(m, n); it has the norm and the singular values of `a`."""
    return np.asarray(np.linalg.qr(a, mode="r")) if isinstance(a, np.ndarray) else qr_positive(a)[1]


def complete_columns(u: Array, rank: int) -> Array:
    """Return `rank` orthonormal columns, those of the isometric `u` (n, r) first, with fixed signs or phases."""
    padded = np.concatenate([u, np.eye(len(u), dtype=u.dtype)], axis=1)
    q = np.linalg.qr(padded)[0][:, :rank]
    return q * leading_phases(q).conj()


def isometry_error(matrix: Array) -> float:
    """Return norm(Q^H Q - 1) of a matrix Q (m, n), inf where its squares overflow; at least 1 where m < n."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = norm(matrix.conj().T @ matrix - np.eye(matrix.shape[1]))
    return math.inf if math.isnan(error) else error


def is_isometry(matrix: Array) -> bool:
    """Test if the columns of a matrix (m, n) are orthonormal to 1e4 eps sqrt(n); those of a QR are to a few eps."""
    return isometry_error(matrix) <= _ISOMETRIC * float(np.finfo(matrix.dtype).eps) * math.sqrt(matrix.shape[1])


def orthonormal_rows(a: Array) -> tuple[Array, Array]:
    """Return l (m, k) and q (k, n), q with orthonormal rows, so that a = l q to roundoff; k is at most the rank.

    In the eigenbasis of the Gram matrix the rows are nearly orthogonal, and a Cholesky factor of their own Gram matrix
    corrects the rest. Directions that the Gram matrix does not resolve are measured: where they hold more than
    roundoff, a QR is needed. Complex matrices, and those not much wider than high, are
    factorized by QR.
    """
    if not isinstance(a, np.ndarray):
        q, r = qr_positive(adjoint(a))
        return adjoint(r), adjoint(q)
    m, n = a.shape
    is_long = m >= _LEAST_ROWS and n >= max(_LEAST_COLUMNS, _LEAST_RATIO * m)
    if is_long and a.dtype.kind == "f" and (factors := _rows_by_gram_matrix(a)) is not None:
        return factors
    q, r = np.linalg.qr(a.conj().T)
    return r.conj().T, q.conj().T


def _rows_by_gram_matrix(a: Array) -> tuple[Array, Array] | None:
    """Return `orthonormal_rows` of a real matrix by a Gram matrix, None where that does not resolve all directions."""
    total = gram(a[None])
    sizes = np.sqrt(np.maximum(np.diagonal(total), 0.0))
    sizes = np.where(sizes > 0, sizes, 1.0)
    # Rows are scaled to length one: roundoff is relative to each row, as in a QR, for its left factor may be large.
    values, vectors = np.linalg.eigh(total / np.multiply.outer(sizes, sizes))
    s = np.sqrt(np.maximum(values, 0.0))
    n_faint = int(np.count_nonzero(s <= _RESOLVED * s[-1]))
    if n_faint == len(a):
        return None
    rotated = (vectors / sizes[:, None]).T.astype(a.dtype, copy=False) @ a  # m [m] n
    roundoff = _ROUNDOFF * np.finfo(a.dtype).eps * np.sqrt(len(a)) * s[-1]
    if n_faint > 0 and norm(rotated[:n_faint]) > roundoff:
        return None
    lengths = s[n_faint:].astype(a.dtype, copy=False)
    rows = rotated[n_faint:] / lengths[:, None]
    lower = np.linalg.cholesky(rows @ rows.T)
    left = (sizes[:, None] * vectors[:, n_faint:]).astype(a.dtype, copy=False) * lengths
    return left @ lower, np.linalg.inv(lower) @ rows


def left_factor(a: Array) -> Array:
    """Return l (m, k) with l l^H = a a^H to roundoff: the left factor of a = l q, q with orthonormal rows, without q.

    In the QR of a rank-deficient matrix without pivots, rows that depend on earlier ones leave rows of roundoff in R: a
    row of R is dropped if no entry exceeds the roundoff of its row of `a`.
    """
    r = np.linalg.qr(a.conj().T, mode="r")  # k m
    size = np.abs(r)
    lengths = np.sqrt(np.square(size).sum(axis=0))
    kept = (size > _ROUNDOFF * np.finfo(a.dtype).eps * np.sqrt(len(a)) * lengths).any(axis=1)
    kept[0] = True
    return np.asarray(r[kept].conj().T)
