r"""The gauge of queries and keys: what scores leave open inside the heads that share a key head.

A score is x~_i [W_Q; b_Q] R(i - j) [W_K; b_K]^T x~_j^T, and the same of W_Q G and W_K G^-T if G commutes with all R:

    columns that do not turn     any invertible G
    a plane                      a complex number, of its columns as one complex column a + i b
    planes of one frequency      any invertible complex G

With the keys on the left, signs and bases of equal values do not depend on the order of the queries. What a key bias
adds to the scores of a query through columns that do not turn is the same for all keys, which softmax does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.formats.matrix.balance import distribute, truncated_product_svd
from tnlib.linalg.canonical_basis import equal_groups, equality_tolerance, group_basis_change
from tnlib.linalg.truncation import noise_level, numerical_rank
from tnlib_adapters.attention.gauge.balance_terms import balance_terms
from tnlib_adapters.attention.rotary import Rotary


@dataclass(frozen=True)
class Columns:
    """The columns of a head by what commutes with their rotation."""

    still: Array  # columns that do not turn
    planes: tuple[Array, Array]  # first and second column of the planes with a frequency of their own
    alike: list[tuple[Array, Array]]  # those of planes that share one

    @classmethod
    def of(cls, rotary: Rotary | None, d_head: int) -> Columns:
        """Sort the columns of a head."""
        none = np.arange(0)
        if rotary is None:
            return cls(np.arange(d_head), (none, none), [])
        first, second = rotary.planes
        values, which, counts = np.unique(rotary.frequencies, return_inverse=True, return_counts=True)
        alone, turns = counts[which] == 1, rotary.frequencies != 0
        still = np.setdiff1d(np.arange(d_head), np.concatenate([first[turns], second[turns]]))
        shared = [which == k for k in np.flatnonzero((counts > 1) & (values != 0))]
        return cls(
            still,
            (first[alone & turns], second[alone & turns]),
            [(first[these], second[these]) for these in shared],
        )


def fix_scores(queries: Array, key: Array, columns: Columns, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the queries (n, d_head) of all heads that share a key head, one below the other, and the key (m, d_head).

    In double precision; `dtype` is the one in which they are known. On the columns that do not turn the key has
    orthogonal columns as long as those of the queries, descending; on a plane both have one length, and the leading
    entry of a + i b of the key is positive.
    """
    q, k = np.zeros_like(queries), np.zeros_like(key)
    if columns.still.size:
        left, right = balanced(key[:, columns.still], queries[:, columns.still].T, dtype)
        k[:, columns.still], q[:, columns.still] = left, right.T
    narrow = np.result_type(dtype, np.complex64)
    if columns.planes[0].size:
        left, right = _as_complex(key, columns.planes).conj(), _as_complex(queries, columns.planes).T
        left, right = balance_terms(left.astype(narrow), right.astype(narrow))
        _put(k, columns.planes, left.conj())
        _put(q, columns.planes, right.T)
    for planes in columns.alike:
        left, right = balanced(_as_complex(key, planes).conj(), _as_complex(queries, planes).T, dtype)
        _put(k, planes, left.conj())
        _put(q, planes, right.T)
    return q, k


def balanced(left: Array, right: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return `left` (m, r) and `right` (r, n) balanced; columns beyond the numerical rank in `dtype` are zero."""
    u, s, vh, exponent = truncated_product_svd(left, right)
    rank = numerical_rank(s, noise_level(float(np.linalg.norm(s)), dtype, min(len(u), vh.shape[1])))
    u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    turn = group_basis_change(u, equal_groups(s, equality_tolerance(s, dtype)), dtype)
    a, b = distribute(u, s, vh, exponent, 0.5)
    new_left, new_right = np.zeros_like(left), np.zeros_like(right)
    new_left[:, :rank], new_right[:rank] = turn.columns(a), turn.rows(b)
    return new_left, new_right


def _as_complex(x: Array, planes: tuple[Array, Array]) -> Array:
    found: Array = x[:, planes[0]] + 1j * x[:, planes[1]]
    return found


def _put(x: Array, planes: tuple[Array, Array], values: Array) -> None:
    x[:, planes[0]], x[:, planes[1]] = values.real, values.imag
