"""Arguments of `Attention` for one layer, from config and tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.architecture import Architecture, Config
from tnlib_adapters.architectures.rope import read_frequencies
from tnlib_adapters.attention.head_norm import HeadNorm
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.factors.projections import Projections, Sizes


def layer_arguments(
    row: Architecture,
    config: Config,
    sizes: Sizes,
    layer: int,
    get: Callable[[str], Array | None],
    *,
    length: int | None,
    function: str,
) -> dict[str, Any]:
    """Return all arguments except weights and biases; `get` loads a tensor by its name in the attention module."""
    turning = read_frequencies(row, config, sizes.d_head, length, function, layer=layer)
    slopes = None if row.alibi is None else row.alibi(config, sizes.n_heads, sizes.d_head)
    cap = None if row.softcap is None else row.stated(config, row.softcap)
    return {
        "scale": row.scale(config, layer, sizes.d_head),
        "rotary": turning and Rotary(turning.radians, pairs=_in_pairs(row), factor=turning.factor),
        "alibi": slopes and np.array(slopes),
        "head_norm": _head_norm(row, config, get),
        "softcap": cap and float(cap),
        "causal": row.causal,
        "window": None if row.window is None else row.window(config, layer),
        "context": turning.context if turning else row.get(config, row.context) if row.context else None,
    }


def per_head(projections: Projections, sizes: Sizes) -> dict[str, Any]:
    """Split weights and biases into heads."""
    counts = {"q": sizes.n_heads, "k": sizes.kv_heads, "v": sizes.kv_heads, "o": sizes.n_heads}
    weights = {f"W_{n.upper()}": _split(w, counts[n], inner_first=n == "o") for n, w in projections.weights.items()}
    biases = {
        f"b_{n.upper()}": b if n == "o" else b.reshape(counts[n], sizes.d_head) for n, b in projections.biases.items()
    }
    return weights | biases


def one_head(arrays: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the weights and biases of one query head and of its key and value head."""
    kv_head = head * len(arrays["W_K"]) // len(arrays["W_Q"])
    index_of = {name: kv_head if name[-1] in "KV" else head for name in arrays if name != "b_O"}
    return {name: arrays[name][k : k + 1] for name, k in index_of.items()}


def _in_pairs(row: Architecture) -> bool:
    return row.rope is not None and row.rope.layout == "pairs"


def _head_norm(row: Architecture, config: Config, get: Callable[[str], Array | None]) -> HeadNorm | None:
    if row.qk_norm is None:
        return None
    query, key = (get(f"{name}.weight") for name in row.qk_norm)
    if query is None or key is None:
        return None
    if row.norm == "rms + 1":
        query, key = 1 + query, 1 + key
    return HeadNorm(query, key, float(row.get(config, str(row.norm_eps))))


def _split(weight: Array, n_heads: int, *, inner_first: bool) -> Array:
    """Split the inner dimension of a projection into heads: (head, d_model, d_head), or (head, d_head, d_model)."""
    if inner_first:
        return weight.reshape(n_heads, -1, weight.shape[1])  # h dh d
    return np.ascontiguousarray(weight.reshape(len(weight), n_heads, -1).transpose(1, 0, 2))  # h d dh
