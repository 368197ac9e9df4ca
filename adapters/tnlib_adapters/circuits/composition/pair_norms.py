"""Frobenius norms and inner products of matrices of all pairs of heads.

For u (r, d) of one head and v (s, d) of another,

    ||u v^T||^2 = tr (u^T u) (v^T v) = <u^T u, v^T v>

so that a pair takes d^2 / 2 multiplications in place of r s d: of two symmetric matrices, entries above the diagonal
count twice. Roundoff of the sum is eps ||u^T u|| ||v^T v||; where this is too much, the product itself is formed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.threads import parallel_matmul

_BLOCK = 1 << 23  # entries of a block of rows of all Gram matrices
_SMALL = 0.3  # squares below eps^0.3 ||u^T u|| ||v^T v|| would be rounded by eps^0.7 of their value or more
_GROUPS = 6  # of layers, which leave out 5/12 of all pairs


def padded_stack(matrices: Sequence[Array]) -> Array:
    """Return matrices (r, d) as one array (matrices, largest r, d), with rows of zeros behind those of lower r."""
    stack = np.zeros((len(matrices), max(map(len, matrices)), matrices[0].shape[1]), np.result_type(*matrices))
    for rows, matrix in zip(stack, matrices, strict=True):
        rows[: len(matrix)] = matrix
    return stack


def pair_norms(u: Array, v: Array, n_layers: int = 1) -> Array:
    """Return ||u[h] v[k]^T||, (h, k), for u (h, r, d) and v (k, s, d), summed in the precision of u and v.

    If u and v hold equally many heads of each of `n_layers` layers, layer by layer, pairs of a layer with an earlier
    one may be left out: NaN.
    """
    d, dtype = u.shape[2], np.result_type(u, v)
    rows = max(1, _BLOCK // (d * max(len(u), len(v), 1)))
    step = -(-n_layers // _GROUPS)
    bounds = [[layer * len(x) // n_layers for layer in (*range(0, n_layers, step), n_layers)] for x in (u, v)]
    groups = [(slice(h, stop), slice(k, None)) for h, stop, k in zip(bounds[0], bounds[0][1:], bounds[1], strict=False)]
    squares = np.full((len(u), len(v)), np.nan)
    for group in groups:
        squares[group] = 0
    for i in range(0, d, rows):
        p, q = (x[:, :, i : i + rows].swapaxes(1, 2) @ x[:, :, i:] for x in (u, v))  # head [r] rows columns
        q[:, :, rows:] *= 2
        p, q = (x.reshape(len(x), -1) for x in (p, q))
        for h, k in groups:
            squares[h, k] += parallel_matmul(p[h], q[k].T)
    sizes = np.outer(*(np.linalg.norm(x @ x.swapaxes(1, 2), axis=(1, 2)) for x in (u, v)))
    norms = np.sqrt(np.maximum(squares, 0))
    for h, k in np.argwhere((squares < np.finfo(dtype).eps ** _SMALL * sizes) & (sizes > 0)):
        norms[h, k] = np.linalg.norm(u[h] @ v[k].T)
    return np.asarray(norms)


def pair_products(a: Array, b: Array, c: Array, d: Array) -> Array:
    """Return <a[h] b[h], c[k] d[k]>, (h, k), for a (h, m, r), b (h, r, n), c (k, m, s) and d (k, s, n)."""
    total, rows = np.zeros((len(a), len(c))), max(1, _BLOCK // (b.shape[2] * max(len(a), len(c), 1)))
    for i in range(0, a.shape[1], rows):
        p, q = ((x[:, i : i + rows] @ y).reshape(len(x), -1) for x, y in ((a, b), (c, d)))  # head (rows n)
        total += parallel_matmul(p, q.T)
    return total


def quotient(a: Array, b: Array) -> Array:
    """Return a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape)), where=b != 0)


def gram_root(gram: Array) -> Array:
    """Return t, of the same shape as the Gram matrices (..., r, r), with t^T t = gram."""
    values, vectors = np.linalg.eigh(gram)
    return np.asarray(np.sqrt(np.maximum(values, 0))[..., None] * vectors.swapaxes(-1, -2))
