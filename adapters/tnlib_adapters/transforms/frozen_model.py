"""A model on one sequence as a product of residual blocks: patterns, norm divisors and feed-forward slopes frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._html import facts, heat_image
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.frozen.layer import FrozenAttention
from tnlib_adapters.reference.embedding import TokenEmbedding
from tnlib_adapters.reference.layers import Unembedding
from tnlib_adapters.reference.weights import Branch, Weights, named_blocks
from tnlib_adapters.transforms.frozen_feed_forward import FrozenFeedForward, LocalMap, freeze_feed_forward
from tnlib_adapters.transforms.frozen_heads import FrozenHeads, freeze_heads
from tnlib_adapters.transforms.frozen_norm import FrozenNorm

_MOST_CELLS = 48  # rows of a pattern in a picture of all heads

FrozenLayer = FrozenAttention | FrozenFeedForward


@dataclass(frozen=True, eq=False)
class FrozenBlock:
    """Layers that read the same stream x, on one sequence: x -> after(x + sum of the layers).

    Parameters
    ----------
    branches
        Attention and feed-forward layers, norms around them included.
    names
        Of every layer: "3" for attention 3, "mlp 3".
    after
        Norm of the sum, or None.
    stream
        (n, d_model), the stream before the block.
    outputs
        Of every layer, (n, d_model): what it adds to this stream, biases and remainder included.
    """

    branches: tuple[FrozenHeads | FrozenFeedForward, ...]
    names: tuple[str, ...]
    after: FrozenNorm | None
    stream: Array
    outputs: tuple[Array, ...]

    @cached_property
    def layers(self) -> tuple[FrozenLayer, ...]:
        """Every layer as an affine map of the stream."""
        return tuple(branch.operator if isinstance(branch, FrozenHeads) else branch for branch in self.branches)

    @property
    def heads(self) -> tuple[FrozenHeads | None, ...]:
        """Of every layer the attention with its patterns; None for feed-forward layers."""
        return tuple(branch if isinstance(branch, FrozenHeads) else None for branch in self.branches)

    def linear(self, x: Array) -> Array:
        """Return the linear part for x (n, d_model)."""
        y = x + sum(linear_part(layer, x) for layer in self.layers)
        return y if self.after is None else self.after.linear(y)

    def apply(self, x: Array) -> Array:
        """Return the affine map for x (n, d_model): for `stream`, the stream after the block."""
        y: Array = x + sum(layer.apply(x) for layer in self.layers)
        return y if self.after is None else self.after.apply(y)


def linear_part(layer: FrozenLayer, x: Array) -> Array:
    """Return the linear part of the output of a layer, (n, d_model)."""
    return layer.terms.apply(x) if isinstance(layer, FrozenAttention) else layer.linear(x)


@dataclass(frozen=True, eq=False, repr=False)
class FrozenModel:
    """A model on one sequence as an affine map of the residual stream, returned by `freeze(model, tokens)`.

    Attention patterns, the divisors of norms and the slopes of feed-forward layers are those of the sequence, so that
    every block is affine, and the final stream is a sum over all paths from the embedding, from biases and from the
    remainders of feed-forward layers. `circuits.logit_contributions` sums the paths of a logit.

    Parameters
    ----------
    blocks
        First block first.
    embedding
        (n, d_model), the stream before the first block.
    embedding_parts
        The same as a sum of named parts: "tokens", "positions" where they are learned, "segment", "norm embedding".
    final_norm
        Norm of the final stream, or None.
    unembed
        Map of the normed final stream to logits, or None.
    tokens
        (n,), the sequence; an image (channels, height, width) for a model of images.
    """

    blocks: tuple[FrozenBlock, ...]
    embedding: Array
    embedding_parts: Mapping[str, Array]
    final_norm: FrozenNorm | None
    unembed: Unembedding | None
    tokens: Array

    def __repr__(self) -> str:
        n, d = self.embedding.shape
        branches = [branch for block in self.blocks for branch in block.branches]
        heads = [str(branch.layer.n_heads) for branch in branches if isinstance(branch, FrozenHeads)]
        shown = ", ".join(heads if len(heads) < 8 else [*heads[:3], "...", heads[-1]])
        others = len(branches) - len(heads)
        share = max(self.remainders.values(), default=0.0)
        ends = f", remainder of a feed-forward layer at most {share:.2g} of its output" if share else ""
        return (
            f"FrozenModel({len(heads)} layers of {shown} heads, {others} feed-forward layers, on {n} positions x {d} "
            f"features{ends})"
        )

    def _repr_html_(self) -> str:
        n, d = self.embedding.shape
        attentions = [heads for block in self.blocks for heads in block.heads if heads is not None]
        n_layers = sum(len(block.branches) for block in self.blocks)
        rows = {
            "attention layers": str(len(attentions)),
            "feed-forward layers": str(n_layers - len(attentions)),
            "sequence": f"{n} positions x {d} features",
            "largest remainder": f"{max(self.remainders.values(), default=0.0):.2g} of the output of its layer",
        }
        heads = {len(layer.patterns) for layer in attentions}
        if len(heads) != 1:
            return facts("FrozenModel", rows)
        mosaic = np.vstack([np.hstack([_framed(pattern) for pattern in layer.patterns]) for layer in attentions])
        label = "patterns, layers as rows and heads as columns"
        return facts("FrozenModel", rows, heat_image(mosaic, label, width=40 * heads.pop()))

    @property
    def stream(self) -> Array:
        """The final stream of the model, (n, d_model), before the final norm."""
        if not self.blocks:
            return self.embedding
        last = self.blocks[-1]
        y: Array = last.stream + sum(last.outputs)
        return y if last.after is None else last.after.apply(y)

    @property
    def remainders(self) -> dict[str, float]:
        """Norm of the remainder of every feed-forward layer that has one, relative to the norm of its output."""
        return {
            name: float(np.linalg.norm(layer.remainder) / np.linalg.norm(output))
            for block in self.blocks
            for layer, name, output in zip(block.branches, block.names, block.outputs, strict=True)
            if isinstance(layer, FrozenFeedForward) and layer.remainder is not None
        }

    def apply(self, x: Array) -> Array:
        """Return the final stream for an initial stream x (n, d_model): for `embedding`, that of the model."""
        for block in self.blocks:
            x = block.apply(x)
        return x


def _framed(pattern: Array) -> Array:
    """Return a pattern (n, n) with a margin on two sides, of a long text the maxima over blocks."""
    starts = np.arange(0, len(pattern), -(-len(pattern) // _MOST_CELLS))
    small = np.maximum.reduceat(np.maximum.reduceat(pattern, starts, axis=0), starts, axis=1)
    return np.pad(small, (0, max(1, len(small) // 16)), constant_values=-0.2)


def freeze_weights(function: str, weights: Weights, tokens: Any, local_map: LocalMap) -> FrozenModel:
    """Return a model on one sequence with its own patterns, divisors and slopes."""
    checked = weights.embedding.check(function, tokens, weights.context)
    if len(checked) != 1:
        raise ArgumentError(f"{function}: tokens must be one sequence, got {len(checked)}; pass one at a time.")
    parts = _embedded(weights, checked)
    x = embedding = np.asarray(sum(parts.values()))
    blocks = []
    for block, names in named_blocks(weights.blocks):
        branches, outputs = zip(*(_freeze_branch(branch, x, local_map) for branch in block.branches), strict=True)
        before, (after, x) = x, FrozenNorm.of(block.after, x + sum(outputs))
        blocks.append(FrozenBlock(branches, names, after, before, outputs))
    final = None if weights.final_norm is None else FrozenNorm.on(weights.final_norm, x)
    return FrozenModel(tuple(blocks), embedding, parts, final, weights.unembed, checked[0])


def _embedded(weights: Weights, tokens: Array) -> dict[str, Array]:
    """Return the embedding of one sequence (1, n) as named parts, (n, d_model) each, behind its norm if it has one."""
    embedding = weights.embedding
    parts = embedding.parts_of_stream(tokens) if isinstance(embedding, TokenEmbedding) else embedding.parts(tokens)
    return {name: part[0] for name, part in parts.items()}


def _freeze_branch(branch: Branch, x: Array, local_map: LocalMap) -> tuple[FrozenHeads | FrozenFeedForward, Array]:
    """Return a layer frozen on the stream x (n, d_model), and what it adds to the stream."""
    if isinstance(branch.layer, Attention):
        return freeze_heads(branch.layer, branch, x)
    return freeze_feed_forward(branch, x, local_map)
