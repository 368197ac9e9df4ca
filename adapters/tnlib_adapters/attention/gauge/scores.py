r"""Gauge fixing of queries and keys: the transformations of a key head and its queries that preserve all scores.

A score is x~_i [W_Q; b_Q] R(i - j) [W_K; b_K]^T x~_j^T. It is invariant to W_Q G and W_K G^-T if G commutes with all R:

    unrotated columns            any invertible G
    a plane                      a complex factor of its columns as one complex column a + i b
    planes of equal frequency    any invertible complex G

With the keys on the left, signs and bases of equal values do not depend on the order of the queries. A key bias adds to
all scores of a query, through unrotated columns, the same number, to which softmax is invariant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.formats.matrix.balance import distribute, truncated_product_svd
from tnlib.linalg.canonical_basis import equal_groups, equality_tolerance, group_basis_change, leading_phases
from tnlib.linalg.scaling import column_exponents, shift
from tnlib.linalg.truncation import noise_level, numerical_rank
from tnlib_adapters.attention.rotary import Rotary


@dataclass(frozen=True)
class Columns:
    """Columns of a head, grouped by the matrices that commute with their rotation."""

    still: Array  # unrotated columns
    planes: tuple[Array, Array]  # first and second column of the planes with distinct frequencies
    alike: list[tuple[Array, Array]]  # the same for planes with a common frequency

    @classmethod
    def of(cls, rotary: Rotary | None, d_head: int) -> Columns:
        """Return the columns of a head by group."""
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
    """Return the balanced queries (n, d_head) of a key head, stacked as rows, and its key (m, d_head).

    In double precision; `dtype` is the precision of the input. On unrotated columns the key has orthogonal columns with
    the norms of those of the queries, descending; on a plane both have equal norms, and the leading entry of a + i b of
    the key is positive.
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
    values: Array = x[:, planes[0]] + 1j * x[:, planes[1]]
    return values


def _put(x: Array, planes: tuple[Array, Array], values: Array) -> None:
    x[:, planes[0]], x[:, planes[1]] = values.real, values.imag


def balance_terms(left: Array, right: Array, power: float = 0.5) -> tuple[Array, Array]:
    """Return A D and D^-1 B of `left` (m, r) and `right` (r, n), D diagonal, balanced term by term.

    Column j of A D and row j of D^-1 B have the norms s[j]^power and s[j]^(1 - power), and the leading entry of the
    column is positive. A term with zero product becomes zero on both sides. Diagonal scaling is the gauge freedom of
    distinct terms, such as the complex planes of distinct rotary frequencies.
    """
    e, f = column_exponents(left), column_exponents(right.T)
    a, b = shift(left, -e), shift(right.T, -f)  # m r, n r
    norms = np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=0)
    s, phases = norms[0] * norms[1], leading_phases(a)
    exponents = np.floor(power * (e + f)).astype(int)
    factors = (2.0 ** (power * (e + f) - exponents)).astype(s.dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        to_left = np.where(s > 0, s**power * factors / norms[0], 0)
        to_right = np.where(s > 0, s ** (1.0 - power) / factors / norms[1], 0)
    a, b = a * (phases.conj() * to_left), b * (phases * to_right)
    return shift(a, exponents), shift(b, e + f - exponents).T
