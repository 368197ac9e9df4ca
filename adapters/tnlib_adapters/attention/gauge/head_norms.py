r"""Gauge fixing of normalised queries and keys.

With q = x W_Q and k = y W_K divided by their root mean squares, a score is (q diag(w)) R (k diag(v))^T. A gauge
transformation must preserve the norms, and w and v are shared by all heads of a layer. For positive w and v it is, by
plane,

    any w, v             a sign of each key head and its queries; c w and v / c
    w[a] <-> w[b]        and the same for v: a quarter turn of all queries and keys
    w[a] = w[b]          and the same for v: any rotation of each key head and its queries

The norm breaks the shift by a key bias and the scaling of queries and keys. Freedom due to zero weights is not fixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.canonical_basis import leading_phases
from tnlib_adapters.attention.gauge.scores import Columns
from tnlib_adapters.attention.norms import HeadNorm

_EQUAL = 16.0  # eps: weights that differ by less are equal up to rounding


def fix_normed(
    q: Array, k: Array, norm: HeadNorm, columns: Columns, dtype: np.dtype[Any]
) -> tuple[Array, Array, HeadNorm]:
    """Return queries (h, d~, d_head), keys (kv, d~, d_head) and their norm with positive weights of equal norm.

    On a plane w[a] >= w[b], or v[a] >= v[b] if the w are equal, and the leading entry of each key head is positive: of
    a + i b where the plane may rotate, of all entries otherwise. On unrotated columns only signs are free.
    """
    w, v = norm.query.astype(np.float64), norm.key.astype(np.float64)
    q, k = q * np.where(w < 0, -1, 1), k * np.where(v < 0, -1, 1)
    w, v = np.abs(w), np.abs(v)
    near = _EQUAL * float(np.finfo(dtype).eps)
    group = len(q) // len(k)
    for a, b in [*zip(*columns.planes, strict=True), *((a, b) for p in columns.alike for a, b in zip(*p, strict=True))]:
        pair = np.array([a, b])
        w[pair], v[pair] = _balanced(w[pair], v[pair])
        equal = [abs(x[a] - x[b]) <= near * x[pair].max() for x in (w, v)]
        if (w[b] > w[a] and not equal[0]) or (equal[0] and v[b] > v[a] and not equal[1]):
            w[pair], v[pair] = w[pair[::-1]], v[pair[::-1]]
            for x in (q, k):
                x[:, :, a], x[:, :, b] = x[:, :, b].copy(), -x[:, :, a]
        turns = k[:, :, a] + 1j * k[:, :, b] if all(equal) else k[:, :, pair].reshape(len(k), -1)
        phases = leading_phases(turns.T.astype(np.result_type(dtype, turns.dtype)), dtype).conj()
        q[:, :, a], q[:, :, b] = _turned(q[:, :, a], q[:, :, b], np.repeat(phases, group))
        k[:, :, a], k[:, :, b] = _turned(k[:, :, a], k[:, :, b], phases)
    for c in columns.still:
        w[[c]], v[[c]] = _balanced(w[[c]], v[[c]])
        signs = leading_phases(k[:, :, c].T, dtype)
        q[:, :, c] *= np.repeat(signs, group)[:, None]
        k[:, :, c] *= signs[:, None]
    return q, k, HeadNorm(w.astype(norm.query.dtype), v.astype(norm.key.dtype), norm.eps)


def _balanced(w: Array, v: Array) -> tuple[Array, Array]:
    """Return c w and v / c of equal norm; both zero if one of them is."""
    of_w, of_v = np.linalg.norm(w), np.linalg.norm(v)
    if of_w == 0 or of_v == 0:
        return 0 * w, 0 * v
    c = np.sqrt(of_v / of_w)
    return c * w, v / c


def _turned(a: Array, b: Array, phases: Array) -> tuple[Array, Array]:
    z = phases[:, None] * (a + 1j * b)
    return z.real, z.imag
