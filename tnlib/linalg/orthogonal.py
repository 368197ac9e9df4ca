"""QR with a fixed sign, and the triangular factor alone."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.signs import leading_phases


def qr_positive(a: Array) -> tuple[Array, Array]:
    """Return q (m, k) isometric and r (k, n) with a real, non-negative diagonal; k = min(m, n)."""
    q, r = np.linalg.qr(a)
    diagonal = np.diagonal(r)
    size = np.abs(diagonal)
    phases = np.where(size > 0, diagonal, 1) / np.where(size > 0, size, 1)
    return q * phases, phases.conj()[:, None] * r


def triangle(a: Array) -> Array:
    """Return r (k, n) with r^H r = a^H a, k = min(m, n); it has the norm and the singular values of `a`."""
    return np.asarray(np.linalg.qr(a, mode="r"))


def fill_columns(u: Array, rank: int) -> Array:
    """Append orthonormal columns to the isometric `u` (n, r) up to `rank`, and fix all signs."""
    padded = np.concatenate([u, np.eye(len(u), dtype=u.dtype)], axis=1)
    q = np.linalg.qr(padded)[0][:, :rank]
    return q * leading_phases(q).conj()
