r"""Forward pass of the last positions of a sequence, with cached keys and values of the positions before.

In a causal model a change of the stream at position i leaves all earlier positions as they are. After such a change
only the positions from i on are computed again; they attend to the keys and values of the earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.reference.weights import ResidualBlock


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """Values of one attention layer on variants of a sequence."""

    keys: Array  # (kv_heads, variants, n, d_head), of all positions
    values: Array  # (kv_heads, variants, n, d_value), of all positions
    patterns: Array  # (heads, variants, m, n): attention weights of the computed positions
    written: Array  # (variants, m, d_model): the output, before a norm behind the layer


def run_last_positions(
    block: ResidualBlock, x: Array, first: int = 0, cache: list[CachedAttention] | None = None
) -> tuple[Array, list[CachedAttention]]:
    """Return the stream (variants, m, d_model) behind a block, and its attention layers.

    Parameters
    ----------
    block
        A block without cross-attention.
    x
        (variants, m, d_model), the stream before the block at the positions from `first` on.
    first
        Number of earlier positions.
    cache
        The attention layers of the block on one sequence, whose keys and values at earlier positions are attended to;
        None without earlier positions.
    """
    attentions: list[CachedAttention] = []

    def attend(layer: Attention, read: Array) -> Array:
        attentions.append(_attend(layer, read, first, cache[len(attentions)] if cache else None))
        return attentions[-1].written

    return block.run(x, attend), attentions


def _attend(layer: Attention, x: Array, first: int, cache: CachedAttention | None) -> CachedAttention:
    variants, m, _ = x.shape
    positions = first + np.arange(m)
    streams = x[None]  # 1 variant m d
    q, k, v = layer.queries(streams, positions), layer.keys(streams, positions), layer.values(streams)
    if cache is not None:
        k, v = _extended(cache.keys, k, first), _extended(cache.values, v, first)
    scores = layer.scores_of(q, k, positions[:, None] - np.arange(first + m))  # h variant m n
    patterns = layer.patterns_of(scores)
    mixed = (patterns @ layer.repeated(v)).reshape(layer.n_heads, variants * m, -1)  # h (variant m) dh
    return CachedAttention(k, v, patterns, layer.output_of_values(mixed).reshape(x.shape))


def _extended(cached: Array, computed: Array, first: int) -> Array:
    """Return cached arrays (kv, 1, n, dh) at the first positions, then those of all variants (kv, variants, m, dh)."""
    earlier = np.broadcast_to(cached[:, :, :first], (*computed.shape[:2], first, computed.shape[3]))
    return np.concatenate([earlier, computed], axis=2)
