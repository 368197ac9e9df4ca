"""The order of heads: no place among them is privileged, unless positions know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scaling import norm
from tnlib_adapters.attention.attention import Attention


def rank_heads(layer: Attention) -> Array:
    """Return the query heads of a layer whose gauge is fixed, but for their order, in their order.

    Groups that share a key head by the norm of their W_O, then of their W_Q, the largest first; so the heads within
    them. Norms that are equal to sqrt(eps) tie, and what decides between such heads are the entries of their weights,
    one after the other; heads that tie in all of them stay.
    """
    group = layer.n_heads // layer.kv_heads
    heads = np.arange(layer.n_heads).reshape(layer.kv_heads, group)
    lengths = np.stack([_lengths(layer.W_O), _lengths(layer.W_Q)], axis=1)  # h (o, q)
    within = np.stack([of[_ranking(layer, of[:, None], lengths)] for of in heads])
    found: Array = within[_ranking(layer, within, lengths)].ravel()
    return found


def in_order(layer: Attention, order: Array) -> Attention:
    """Return the layer with its query heads in this order, which keeps groups together."""
    group = layer.n_heads // layer.kv_heads
    own = dict.fromkeys(("W_Q", "W_O", "b_Q", "alibi"), order)
    own |= dict.fromkeys(("W_K", "W_V", "b_K", "b_V"), order[::group] // group)
    arrays: dict[str, Any] = {name: None if (a := getattr(layer, name)) is None else a[of] for name, of in own.items()}
    return replace(layer, **arrays)


def _ranking(layer: Attention, sets: Array, lengths: Array) -> Array:
    """Return the order of sets of heads (sets, heads), given the lengths (heads, 2) of each head."""
    tolerance = float(np.sqrt(max(np.finfo(w.dtype).eps for w in (layer.W_Q, layer.W_O))))
    keys = sets[:, 0] // (layer.n_heads // layer.kv_heads)
    told = ((layer.W_O, sets), (layer.W_Q, sets), (layer.W_K, keys), (layer.W_V, keys))

    def entries(tied: Array) -> Array:
        parts = [w[of[tied]].reshape(len(tied), -1) for w, of in told]
        return np.concatenate([part / (np.abs(part).max() or 1.0) for part in parts], axis=1)

    norms = np.linalg.norm(lengths[sets], axis=1)  # sets (o, q)
    of_norms = _split(np.arange(len(sets)), lambda rows: norms[rows], tolerance)
    return np.concatenate([rows for tied in of_norms for rows in _split(tied, entries, tolerance)])


def _lengths(heads: Array) -> Array:
    """Return the norms of the heads of one projection, the largest of them 1."""
    lengths = np.array([norm(head) for head in heads])
    found: Array = lengths / (lengths.max() or 1.0)
    return found


def _split(rows: Array, features: Callable[[Array], Array], tolerance: float) -> list[Array]:
    """Return rows in descending lexicographic order of their features, as groups within which all of them tie.

    Two entries tie where no gap between neighbours lies between them; features are of order 1.
    """
    if len(rows) == 1:
        return [rows]
    of_rows = features(rows)
    gaps = -np.diff(-np.sort(-of_rows, axis=0), axis=0)
    apart = gaps.max(axis=0) > tolerance
    if not apart.any():
        return [rows]
    value = of_rows[:, np.argmax(apart)]
    down = np.argsort(-value, kind="stable")
    cuts = np.flatnonzero(-np.diff(value[down]) > tolerance) + 1
    return [part for one in np.split(rows[down], cuts) for part in _split(one, features, tolerance)]
