"""Attention knock-out: the loss of every sequence if one head does not attend to some positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.discovery.target_loss import Targets
from tnlib_adapters.reference.key_value_cache import CachedAttention, run_last_positions
from tnlib_adapters.reference.weights import ResidualBlock, Weights, attention_layers


def losses_without_attention(weights: Weights, targets: Targets, blocked: Array) -> tuple[Array, Array]:
    """Return the mean cross-entropy of every sequence, (b,), and with one head knocked out, (layers, heads, b).

    A knocked-out head does not attend to the `blocked` positions, bool (b, n, n): its weights there are 0, and those of
    a query that attends to nothing else are all 0. The other weights of the row are rescaled to sum to 1. Later layers
    are computed anew, for all heads of a layer at once, from the first position on that the change can reach.
    """
    each = [
        _of_sequence(weights, targets, tokens, at, not_seen)
        for tokens, at, not_seen in zip(targets.tokens, targets.at, blocked, strict=True)
    ]
    losses, without = zip(*each, strict=True)
    return np.array(losses), np.stack(without, axis=-1)


def _of_sequence(weights: Weights, targets: Targets, tokens: Array, at: Array, blocked: Array) -> tuple[float, Array]:
    """Return the loss of one sequence (n,), and with one head knocked out, (layers, heads)."""
    streams, caches = [weights.embedding(tokens[None])], []  # 1 n d
    for block in weights.blocks:
        stream, attentions = run_last_positions(block, streams[-1])
        streams.append(stream)
        caches.append(attentions)
    first = _first_changed(weights, blocked)
    predicting = np.flatnonzero(at)
    later = predicting[predicting >= first]
    losses = targets.losses_of_rows(streams[-1][0, predicting], tokens[predicting + 1])  # t
    earlier, count = losses[predicting < first].sum(), max(len(predicting), 1)
    without = []
    for k, block in enumerate(weights.blocks):
        for change in _changes(block, caches[k], blocked, first):
            x = _behind(block, streams[k][:, first:], streams[k + 1][:, first:], change, first, caches[k])  # h m d
            for number, following in enumerate(weights.blocks[k + 1 :], k + 1):
                x = run_last_positions(following, x, first, caches[number])[0]
            rows, actual = x[:, later - first], np.tile(tokens[later + 1], len(x))
            sums = targets.losses_of_rows(rows.reshape(-1, rows.shape[-1]), actual).reshape(len(x), -1).sum(axis=1)
            without.append((earlier + sums) / count)
    return float(losses.sum() / count), np.array(without)


def _first_changed(weights: Weights, blocked: Array) -> int:
    """Return the first position that a change can reach: that of the first query with blocked keys, 0 if not causal."""
    if not all(layer.causal for layer in attention_layers(weights.blocks)):
        return 0
    queries = np.flatnonzero(blocked.any(axis=1))
    return int(queries[0]) if len(queries) else len(blocked) - 1


def _changes(block: ResidualBlock, cache: list[CachedAttention], blocked: Array, first: int) -> Iterator[Array]:
    """Yield for every attention layer of a block what each of its heads, knocked out, adds to the stream, (h, m, d)."""
    layers = [(branch.layer, branch.behind) for branch in block.branches if isinstance(branch.layer, Attention)]
    for (layer, behind), values in zip(layers, cache, strict=True):
        patterns = values.patterns[:, 0, first:]  # h m n
        left = np.where(blocked[first:], 0, patterns)
        sums = left.sum(axis=-1, keepdims=True)
        left = np.divide(left, sums, out=np.zeros_like(left), where=sums > 0)
        changes = layer.head_outputs(left - patterns, values.values[:, 0])  # h m d
        written = values.written[0, first:]
        yield changes if behind is None else behind(written + changes) - behind(written)


def _behind(
    block: ResidualBlock, before: Array, after: Array, change: Array, first: int, cache: list[CachedAttention]
) -> Array:
    """Return the stream (h, m, d) behind a block whose layers add `change` (h, m, d) to what they write."""
    if block.after is None:
        return after + change
    return block.after(run_last_positions(ResidualBlock(block.branches, None), before, first, cache)[0] + change)
