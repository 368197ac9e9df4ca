"""Arguments of `Attention` for one layer, from config and tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.attention_sizes import Sizes
from tnlib_adapters.architectures.wiring import AttentionWiring
from tnlib_adapters.attention.norms import HeadNorm, LatentNorm
from tnlib_adapters.attention.relative_bias import RelativeBias
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.factors.projections import Projections


def layer_arguments(
    attention: AttentionWiring, get: Callable[[str], Array | None], *, length: int | None, function: str
) -> dict[str, Any]:
    """Return all arguments except weights and biases; `get` loads a tensor by its name."""
    turning = attention.frequencies(length, function)
    return {
        "scale": attention.scale,
        "rotary": turning and Rotary(turning.radians, pairs=attention.pairs, factor=turning.factor),
        "alibi": attention.alibi and np.array(attention.alibi),
        "relative_bias": _relative_bias(attention, get),
        "head_norm": _head_norm(attention, get, function),
        "latent_norm": _latent_norm(attention, get, function),
        "softcap": attention.softcap,
        "causal": attention.causal,
        "window": attention.window,
        "context": turning.context if turning else attention.context,
        "cross": attention.cross,
    }


def per_head(projections: Projections, sizes: Sizes) -> dict[str, Any]:
    """Split weights and biases into heads."""
    counts = {"q": sizes.n_heads, "k": sizes.kv_heads, "v": sizes.kv_heads, "o": sizes.n_heads}
    weights = {f"W_{n.upper()}": _split(w, counts[n], inner_first=n == "o") for n, w in projections.weights.items()}
    biases = {f"b_{n.upper()}": b if n == "o" else b.reshape(counts[n], -1) for n, b in projections.biases.items()}
    return weights | biases


def one_head(arrays: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the weights and biases of one query head and of its key and value head."""
    kv_head = head * len(arrays["W_K"]) // len(arrays["W_Q"])
    index_of = {name: kv_head if name[-1] in "KV" else head for name in arrays if name != "b_O"}
    return {name: arrays[name][k : k + 1] for name, k in index_of.items()}


def _relative_bias(attention: AttentionWiring, get: Callable[[str], Array | None]) -> RelativeBias | None:
    bias = attention.relative_bias
    table = None if bias is None else get(bias.table.weight)  # bins h
    if table is None or bias is None:
        return None
    return RelativeBias(np.ascontiguousarray(table.T), bias.max_distance, one_sided=attention.causal)


def _head_norm(attention: AttentionWiring, get: Callable[[str], Array | None], function: str) -> HeadNorm | None:
    if not attention.head_norms:
        return None
    weights = [(norm, get(norm.weight)) for norm in attention.head_norms]
    query, key = (None if weight is None else norm.offset + weight for norm, weight in weights)
    if query is None or key is None:
        return None
    return HeadNorm(query, key, attention.head_norms[0].required_eps(function))


def _latent_norm(attention: AttentionWiring, get: Callable[[str], Array | None], function: str) -> LatentNorm | None:
    latent = attention.latent
    if latent is None:
        return None
    query = None if latent.query_down is None else get(latent.query_down.weight)
    down = get(latent.down.weight)
    if down is None:
        return None
    return LatentNorm(
        query=query if query is None or latent.query_down is None else latent.query_down.on_rows(query),
        key_value=latent.down.on_rows(down)[:, : latent.rank],
        eps=latent.norm.required_eps(function),
        n_rotated=latent.n_rotated,
    )


def _split(weight: Array, n_heads: int, *, inner_first: bool) -> Array:
    """Split the inner dimension of a projection into heads: (head, d_model, d_head), or (head, d_head, d_model)."""
    if inner_first:
        return weight.reshape(n_heads, -1, weight.shape[1])  # h dh d
    return np.ascontiguousarray(weight.reshape(len(weight), n_heads, -1).transpose(1, 0, 2))  # h d dh
