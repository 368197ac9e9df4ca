"""The singular value decomposition by one-sided Jacobi rotations: slow, and it always converges."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.orthogonal import fill_columns

_SWEEPS = 60


def jacobi_svd(a: Array) -> tuple[Array, Array, Array]:
    """Return u (m, n), s (n,), vh (n, n) of `a` (m, n), m >= n.

    Columns are rotated pair by pair until all are orthogonal (Hestenes, "Inversion of matrices by
    biorthogonalization and related results", J. SIAM 6 (1958)): a V = u diag(s). Pairs without a column in common
    are rotated at once, in the order of a round robin. The triangle of a QR stands in for a tall matrix.
    """
    q, work = np.linalg.qr(a)
    n = work.shape[1]
    v = np.eye(n, dtype=a.dtype)
    eps = np.finfo(a.dtype).eps
    players = np.arange(n + n % 2)  # the last one of an odd count has a round off
    for _ in range(_SWEEPS):
        largest = 0.0
        for _ in range(len(players) - 1):
            half = len(players) // 2
            pairs = np.stack([players[:half], players[half:][::-1]])
            i, j = pairs[:, (pairs < n).all(axis=0)]
            largest = max(largest, _rotate(work, v, i, j))
            players = np.concatenate([players[:1], players[-1:], players[1:-1]])
        if largest <= n * eps:
            break
    s = np.linalg.norm(work, axis=0)
    order = np.argsort(-s, kind="stable")
    work, s, v = work[:, order], s[order], v[:, order]
    rank = int(np.count_nonzero(s > n * eps * s[0]))  # the directions of columns below are rounding errors
    u = fill_columns(work[:, :rank] / s[:rank], n)
    return q @ (u * _phases_towards(u, work)), s, v.conj().T


def _rotate(work: Array, v: Array, i: Array, j: Array) -> float:
    """Make columns i and j of `work` orthogonal, for many pairs at once; return the largest cosine there was."""
    a, b = work[:, i], work[:, j]
    aa, bb = np.sum(np.abs(a) ** 2, axis=0), np.sum(np.abs(b) ** 2, axis=0)
    ab = np.sum(a.conj() * b, axis=0)
    size = np.abs(ab)
    cosine = size / np.where(aa * bb > 0, np.sqrt(aa * bb), 1)
    turn = cosine > np.finfo(work.dtype).eps
    size = np.where(turn, size, 1)
    phase = np.where(turn, ab / size, 1)
    zeta = (bb - aa) / (2 * size)
    t = np.where(turn, np.where(zeta < 0, -1, 1) / (np.abs(zeta) + np.hypot(1, zeta)), 0)
    c = 1 / np.hypot(1, t)
    s = c * t
    for x in (work, v):
        x[:, i], x[:, j] = c * x[:, i] - s * phase.conj() * x[:, j], s * phase * x[:, i] + c * x[:, j]
    return float(cosine.max(initial=0.0))


def _phases_towards(u: Array, work: Array) -> Array:
    """Return the phase that turns each column of `u` into the direction of that of `work`."""
    inner = np.sum(u.conj() * work, axis=0)
    size = np.abs(inner)
    return np.where(size > 0, inner / np.where(size > 0, size, 1), 1)
