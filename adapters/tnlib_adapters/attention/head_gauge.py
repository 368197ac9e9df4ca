"""Gauge fixing of the heads of one attention layer, and their canonical order.

A score is x~_i [W_Q; b_Q] R(i - j) [W_K; b_K]^T x~_j^T. It is invariant to W_Q G and W_K G^-T if G commutes with all R:

    unrotated columns            any invertible G
    a plane                      a complex factor of its columns as one complex column a + i b
    planes of equal frequency    any invertible complex G

With the keys on the left, signs and bases of equal values do not depend on the order of the queries. A key bias adds to
all scores of a query, through unrotated columns, the same number, to which softmax is invariant.

With a QK norm, q = x W_Q and k = y W_K are divided by their root mean squares, and a score is (q diag(w)) R (k
diag(v))^T. A gauge transformation must preserve the norms, and w and v are shared by all heads of a layer. For positive
w and v it is, by plane,

    any w, v             a sign of each key head and its queries; c w and v / c
    w[a] <-> w[b]        and the same for v: a quarter turn of all queries and keys
    w[a] = w[b]          and the same for v: any rotation of each key head and its queries

The norm breaks the shift by a key bias and the scaling of queries and keys. Freedom due to zero weights is not fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib.formats.matrix.low_rank import distribute, truncated_product_svd
from tnlib.linalg.canonical_basis import equal_groups, equality_tolerance, group_basis_change, leading_phases
from tnlib.linalg.scaling import column_exponents, norm, shift
from tnlib.linalg.truncation import noise_level, numerical_rank
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.norms import HeadNorm
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


def fix_heads(layer: Attention, function: str) -> Attention:
    """Return the layer with the gauge of every head fixed; `function` is the name in error messages."""
    if any(getattr(layer, name).dtype.kind == "c" for name in ("W_Q", "W_K", "W_V", "W_O")):
        raise ArgumentError(f"{function}: attention must have real weights, got complex ones; pass their real parts.")
    if layer.latent_norm is not None:
        raise ArgumentError(
            f"{function}: attention must have no norm of latent vectors, got {layer}; pass its numerator()."
        )
    return _fix_values(_fix_queries_and_keys(layer))


# ------------------------------------------------------------------------------------------------- queries and keys


def _fix_queries_and_keys(layer: Attention) -> Attention:
    columns, group = Columns.of(layer.rotary, layer.d_head), layer.group_size
    q, k = (layer.with_bias(name).astype(np.float64) for name in "QK")  # h d~ dh, kv d~ dh
    dtype = _coarser(layer.W_Q, layer.W_K)
    head_norm = layer.head_norm
    unseen = columns.still if layer.softcap is None and head_norm is None else columns.still[:0]
    k[:, -1, unseen] = 0
    if head_norm is not None:
        q, k, head_norm = fix_normed(q, k, head_norm, columns, dtype)
    else:
        stacked = q.reshape(layer.kv_heads, -1, layer.d_head)  # kv (group d~) dh
        pairs = [fix_scores(queries, key, columns, dtype) for queries, key in zip(stacked, k, strict=True)]
        q = np.concatenate([queries.reshape(group, *q.shape[1:]) for queries, _ in pairs])
        k = np.stack([key for _, key in pairs])
    k[:, -1, unseen] = 0  # exact zero instead of roundoff
    return replace(
        layer,
        W_Q=q[:, :-1].astype(layer.W_Q.dtype),
        b_Q=None if layer.b_Q is None else q[:, -1].astype(layer.b_Q.dtype),
        W_K=k[:, :-1].astype(layer.W_K.dtype),
        b_K=None if layer.b_K is None else k[:, -1].astype(layer.b_K.dtype),
        head_norm=head_norm,
    )


# ------------------------------------------------------------------------------------------------- values and outputs


def _fix_values(layer: Attention) -> Attention:
    v, o = layer.with_bias("V").astype(np.float64), layer.W_O.astype(np.float64)  # kv d~ dh, h dh d
    group, dtype, b_o = layer.group_size, _coarser(layer.W_V, layer.W_O), layer.b_O
    taken_up = layer.b_V is not None and b_o is not None
    if taken_up and b_o is not None:
        bias_outputs = layer.repeated(v[:, -1:]) @ o  # h 1 [dh] d
        b_o = (b_o + bias_outputs.sum(axis=(0, 1))).astype(b_o.dtype)
        v[:, -1] = 0
    for g in range(layer.kv_heads):
        heads = o[g * group : (g + 1) * group]
        v[g], wide = balanced(v[g], np.concatenate(list(heads), axis=1), dtype)  # dh (h d)
        o[g * group : (g + 1) * group] = wide.reshape(layer.d_value, group, -1).transpose(1, 0, 2)
    if taken_up:
        v[:, -1] = 0
    return replace(
        layer,
        W_V=v[:, :-1].astype(layer.W_V.dtype),
        b_V=None if layer.b_V is None else v[:, -1].astype(layer.b_V.dtype),
        W_O=o.astype(layer.W_O.dtype),
        b_O=b_o,
    )


def _coarser(a: Array, b: Array) -> np.dtype[Any]:
    """Return the dtype of lower precision."""
    return min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)


# ---------------------------------------------------------------------------------------------------- order of heads


def rank_heads(layer: Attention) -> Array:
    """Return the canonical order of the query heads of a layer whose gauge is otherwise fixed.

    Groups with a common key head are sorted by the norm of their W_O, then of their W_Q, descending; so are the heads
    within a group. Norms that are equal to sqrt(eps) tie; ties are broken by the entries of the weights in turn. Heads
    that tie in all entries keep their order.
    """
    heads = np.arange(layer.n_heads).reshape(layer.kv_heads, layer.group_size)
    lengths = np.stack([_lengths(layer.W_O), _lengths(layer.W_Q)], axis=1)  # h (o, q)
    within = np.stack([members[_ranking(layer, members[:, None], lengths)] for members in heads])
    order: Array = within[_ranking(layer, within, lengths)].ravel()
    return order


def _ranking(layer: Attention, sets: Array, lengths: Array) -> Array:
    """Return the order of sets of heads (sets, heads), given the norms (heads, 2) of each head."""
    tolerance = float(np.sqrt(max(np.finfo(w.dtype).eps for w in (layer.W_Q, layer.W_O))))
    keys = sets[:, 0] // layer.group_size
    weights = ((layer.W_O, sets), (layer.W_Q, sets), (layer.W_K, keys), (layer.W_V, keys))

    def entries(tied: Array) -> Array:
        parts = [w[heads_of[tied]].reshape(len(tied), -1) for w, heads_of in weights]
        return np.concatenate([part / (np.abs(part).max() or 1.0) for part in parts], axis=1)

    norms = np.linalg.norm(lengths[sets], axis=1)  # sets (o, q)
    of_norms = _split(np.arange(len(sets)), lambda rows: norms[rows], tolerance)
    return np.concatenate([rows for tied in of_norms for rows in _split(tied, entries, tolerance)])


def _lengths(heads: Array) -> Array:
    """Return the norms of the heads of one projection, relative to the largest."""
    lengths = np.array([norm(head) for head in heads])
    relative: Array = lengths / (lengths.max() or 1.0)
    return relative


def _split(rows: Array, features: Callable[[Array], Array], tolerance: float) -> list[Array]:
    """Return rows in descending lexicographic order of their features, as groups of tied rows.

    Two entries tie if no gap above the tolerance separates them; features are of order 1.
    """
    if len(rows) == 1:
        return [rows]
    of_rows = features(rows)
    gaps = -np.diff(-np.sort(-of_rows, axis=0), axis=0)
    separated = gaps.max(axis=0) > tolerance
    if not separated.any():
        return [rows]
    value = of_rows[:, np.argmax(separated)]
    down = np.argsort(-value, kind="stable")
    cuts = np.flatnonzero(-np.diff(value[down]) > tolerance) + 1
    return [part for tied in np.split(rows[down], cuts) for part in _split(tied, features, tolerance)]
