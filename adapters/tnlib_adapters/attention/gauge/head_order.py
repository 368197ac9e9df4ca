"""Canonical order of the heads of a layer: by norm, with ties broken by the entries of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scaling import norm
from tnlib_adapters.attention.attention import Attention


def rank_heads(layer: Attention) -> Array:
    """Return the canonical order of the query heads of a layer whose gauge is otherwise fixed.

    Groups with a common key head are sorted by the norm of their W_O, then of their W_Q, descending; so are the heads
    within a group. Norms that are equal to sqrt(eps) tie; ties are broken by the entries of the weights in turn. Heads
    that tie in all entries keep their order.
    """
    group = layer.n_heads // layer.kv_heads
    heads = np.arange(layer.n_heads).reshape(layer.kv_heads, group)
    lengths = np.stack([_lengths(layer.W_O), _lengths(layer.W_Q)], axis=1)  # h (o, q)
    within = np.stack([members[_ranking(layer, members[:, None], lengths)] for members in heads])
    order: Array = within[_ranking(layer, within, lengths)].ravel()
    return order


def in_order(layer: Attention, order: Array) -> Attention:
    """Return the layer with its query heads in this order, which must keep groups together."""
    group = layer.n_heads // layer.kv_heads
    index_of = dict.fromkeys(("W_Q", "W_O", "b_Q", "alibi"), order)
    index_of |= dict.fromkeys(("W_K", "W_V", "b_K", "b_V"), order[::group] // group)
    arrays: dict[str, Any] = {
        name: None if (a := getattr(layer, name)) is None else a[index] for name, index in index_of.items()
    }
    return replace(layer, **arrays)


def _ranking(layer: Attention, sets: Array, lengths: Array) -> Array:
    """Return the order of sets of heads (sets, heads), given the norms (heads, 2) of each head."""
    tolerance = float(np.sqrt(max(np.finfo(w.dtype).eps for w in (layer.W_Q, layer.W_O))))
    keys = sets[:, 0] // (layer.n_heads // layer.kv_heads)
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
