"""Gauge fixing of every head of one attention layer, without sorting the heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
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
    columns, group = Columns.of(layer.rotary, layer.d_head), layer.n_heads // layer.kv_heads
    q, k = _with_bias(layer.W_Q, layer.b_Q), _with_bias(layer.W_K, layer.b_K)  # h d~ dh, kv d~ dh
    dtype = _coarser(layer.W_Q, layer.W_K)
    norm = layer.head_norm
    unseen = columns.still if layer.softcap is None and norm is None else columns.still[:0]
    k[:, -1, unseen] = 0
    if norm is not None:
        q, k, norm = fix_normed(q, k, norm, columns, dtype)
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
        head_norm=norm,
    )


def _stacked(q: Array, k: Array, key: int, group: int) -> tuple[Array, Array]:
    """Return the queries of a key head, stacked as rows, and the key."""
    return q[key * group : (key + 1) * group].reshape(-1, q.shape[2]), k[key]


# ------------------------------------------------------------------------------------------------- values and outputs


def _fix_values(layer: Attention) -> Attention:
    v, o = _with_bias(layer.W_V, layer.b_V), layer.W_O.astype(np.float64)  # kv d~ dh, h dh d
    group, dtype, b_o = layer.n_heads // layer.kv_heads, _coarser(layer.W_V, layer.W_O), layer.b_O
    taken_up = layer.b_V is not None and b_o is not None
    if taken_up and b_o is not None:
        bias_outputs = np.repeat(v[:, -1:], group, axis=0) @ o  # h 1 [dh] d
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


def _with_bias(weight: Array, bias: Array | None) -> Array:
    """Return weights (heads, d, d_head) in double precision with the bias as their last row, zero if absent."""
    last = np.zeros_like(weight[:, :1]) if bias is None else bias[:, None]
    return np.concatenate([weight, last], axis=1).astype(np.float64)


def _coarser(a: Array, b: Array) -> np.dtype[Any]:
    """Return the dtype of lower precision."""
    return min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
