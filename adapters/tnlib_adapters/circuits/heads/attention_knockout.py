"""Attention knock-out: the loss of every sequence if one head does not attend to some positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.circuits.discovery.gated_heads import GatedHeads
from tnlib_adapters.circuits.discovery.targets import Targets
from tnlib_adapters.reference.model import run_block
from tnlib_adapters.reference.weights import Block, Weights


def losses_without_attention(weights: Weights, targets: Targets, blocked: Array) -> tuple[Array, Array]:
    """Return the mean cross-entropy of every sequence, (b,), and with one head knocked out, (layers, heads, b).

    A knocked-out head does not attend to the `blocked` positions, bool (b, n, n): its weights there are 0, and those of
    a query that attends to nothing else are all 0. The other weights of the row are rescaled to sum to 1. Later layers
    are computed anew.
    """
    streams = [weights.embedding(targets.tokens)]  # b n d
    for block in weights.blocks:
        streams.append(run_block(block, streams[-1])[0])
    losses = []
    for k, block in enumerate(weights.blocks):
        for changes in _changes(block, streams[k], blocked):
            losses.append([targets.losses(_after(weights, k, streams, change)) for change in changes])
    return targets.losses(streams[-1]), np.array(losses)


def _changes(block: Block, stream: Array, blocked: Array) -> Iterator[Array]:
    """Yield for every attention layer of a block the changes of its output, (h, b, n, d)."""
    for branch in block.branches:
        heads = GatedHeads.of(branch)
        if heads is not None:
            yield _changes_of_heads(heads, stream, blocked)


def _changes_of_heads(heads: GatedHeads, stream: Array, blocked: Array) -> Array:
    values = heads.values(np.broadcast_to(stream, (3, 1, *stream.shape)))  # all heads read the same
    left = np.where(blocked, 0, values.pattern)  # h b n n
    sums = left.sum(axis=-1, keepdims=True)
    left = np.divide(left, sums, out=np.zeros_like(left), where=sums > 0)
    outputs = heads.outputs(values)
    changes = heads.outputs(replace(values, pattern=left)) - outputs
    if heads.behind is None:
        return changes
    total = outputs.sum(axis=0) + (0 if heads.layer.b_O is None else heads.layer.b_O)
    return heads.behind(total + changes) - heads.behind(total)


def _after(weights: Weights, k: int, streams: list[Array], change: Array) -> Array:
    """Return the final stream (b, n, d) if the layers of block k add `change` to what they write."""
    block = weights.blocks[k]
    if block.after is None:
        stream = streams[k + 1] + change
    else:
        plain = Block(block.branches, None)
        stream = block.after(run_block(plain, streams[k])[0] + change)
    for later in weights.blocks[k + 1 :]:
        stream = run_block(later, stream)[0]
    return stream
