"""Frobenius norms of the products of the matrices of all pairs of heads.

For u (r, d) of one head and v (s, d) of another,

    ||u v^T||^2 = tr (u^T u) (v^T v) = <u^T u, v^T v>

so that a pair takes d^2 / 2 multiplications in place of r s d: of two symmetric matrices, entries above the diagonal
count twice. Roundoff of the sum is eps ||u||^2 ||v||^2; where this is too much, the product itself is formed.
"""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.threads import parallel_matmul

_BLOCK = 1 << 22  # entries of a block of rows of all Gram matrices
_SMALL = 1e-6  # of ||u||^2 ||v||^2: smaller squares would be rounded by 1e-10 of their value or more


def pair_norms(u: Array, v: Array) -> Array:
    """Return ||u[h] v[k]^T||, (h, k), for u (h, r, d) and v (k, s, d), in double precision."""
    u, v = u.astype(np.float64, copy=False), v.astype(np.float64, copy=False)
    d = u.shape[2]
    rows = max(1, _BLOCK // (d * max(len(u), len(v), 1)))
    squares = np.zeros((len(u), len(v)))
    for i in range(0, d, rows):
        p, q = (x[:, :, i : i + rows].swapaxes(1, 2) @ x[:, :, i:] for x in (u, v))  # head [r] rows columns
        q[:, :, rows:] *= 2
        squares += parallel_matmul(p.reshape(len(u), -1), q.reshape(len(v), -1).T)
    sizes = np.outer(*(np.square(x).sum(axis=(1, 2)) for x in (u, v)))
    norms = np.sqrt(np.maximum(squares, 0))
    for h, k in np.argwhere((squares < _SMALL * sizes) & (sizes > 0)):
        norms[h, k] = np.linalg.norm(u[h] @ v[k].T)
    return norms
