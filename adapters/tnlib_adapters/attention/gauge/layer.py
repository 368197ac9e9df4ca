"""Gauge fixing of the heads of one attention layer, and their canonical order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.scaling import norm
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.gauge.head_norms import fix_normed
from tnlib_adapters.attention.gauge.scores import Columns, balanced, fix_scores


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
        pairs = [fix_scores(*_stacked(q, k, g, group), columns, dtype) for g in range(layer.kv_heads)]
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


def _stacked(q: Array, k: Array, key: int, group: int) -> tuple[Array, Array]:
    """Return the queries of a key head, stacked as rows, and the key."""
    return q[key * group : (key + 1) * group].reshape(-1, q.shape[2]), k[key]


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


def in_order(layer: Attention, order: Array) -> Attention:
    """Return the layer with its query heads in this order, which must keep groups together."""
    group = layer.group_size
    index_of = dict.fromkeys(("W_Q", "W_O", "b_Q", "alibi"), order)
    index_of |= dict.fromkeys(("W_K", "W_V", "b_K", "b_V"), order[::group] // group)
    arrays: dict[str, Any] = {
        name: None if (a := getattr(layer, name)) is None else a[index] for name, index in index_of.items()
    }
    return replace(layer, **arrays)


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
