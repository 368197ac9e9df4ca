"""A model on one sequence as a product of residual blocks: patterns, norm divisors and feed-forward slopes frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._html import facts, heat_image
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.frozen.layer import FrozenAttention
from tnlib_adapters.reference.layers import Norm, Unembedding
from tnlib_adapters.reference.weights import Block, Weights, named_blocks
from tnlib_adapters.transforms.frozen_feed_forward import FrozenFeedForward, LocalMap, freeze_feed_forward
from tnlib_adapters.transforms.frozen_heads import FrozenHeads, freeze_heads
from tnlib_adapters.transforms.frozen_norm import FrozenNorm

_MOST_CELLS = 48  # rows of a pattern in a picture of all heads

FrozenLayer = FrozenAttention | FrozenFeedForward


@dataclass(frozen=True, eq=False)
class FrozenBlock:
    """Layers that read the same stream x, on one sequence: x -> after(x + sum of the layers).

    Values are computed when they are read, so that patterns of the last layer do not need what comes after them.

    Parameters
    ----------
    block
        The layers and the norm of their sum.
    names
        Of every layer: "3" for attention 3, "mlp 3".
    local_map
        Linear map of feed-forward layers.
    previous
        The block before, or the stream (n, d_model) before this block.
    branches_at
        The layers at the one position of `previous`; None to freeze them on its stream.
    """

    block: Block
    names: tuple[str, ...]
    local_map: LocalMap
    previous: FrozenBlock | Array
    branches_at: tuple[FrozenHeads | FrozenFeedForward, ...] | None = None

    @cached_property
    def stream(self) -> Array:
        """(n, d_model), the stream before the block."""
        return self.previous.stream_after if isinstance(self.previous, FrozenBlock) else self.previous

    @property
    def stream_after(self) -> Array:
        """(n, d_model), the stream after the block."""
        return self._norm_and_stream_after[1]

    @property
    def after(self) -> FrozenNorm | None:
        """Norm of the sum, or None."""
        return None if self.block.after is None else self._norm_and_stream_after[0]

    @cached_property
    def _norm_and_stream_after(self) -> tuple[FrozenNorm | None, Array]:
        return FrozenNorm.of(self.block.after, self.stream + sum(self.outputs))

    @cached_property
    def heads(self) -> tuple[FrozenHeads | None, ...]:
        """Of every layer the attention with its patterns; None for feed-forward layers."""
        return tuple(
            freeze_heads(branch.layer, branch, self.stream) if isinstance(branch.layer, Attention) else None
            for branch in self.block.branches
        )

    @cached_property
    def branches(self) -> tuple[FrozenHeads | FrozenFeedForward, ...]:
        """Attention and feed-forward layers, norms around them included."""
        if self.branches_at is not None:
            return self.branches_at
        return tuple(
            freeze_feed_forward(branch, self.stream, self.local_map) if heads is None else heads
            for heads, branch in zip(self.heads, self.block.branches, strict=True)
        )

    @property
    def outputs(self) -> tuple[Array, ...]:
        """Of every layer, (n, d_model): what it adds to the stream, biases and remainder included."""
        return tuple(branch.output for branch in self.branches)

    @property
    def has_attention(self) -> bool:
        """True if a layer is attention."""
        return any(isinstance(branch.layer, Attention) for branch in self.block.branches)

    def at(self, position: int, previous: FrozenBlock | Array) -> FrozenBlock:
        """Return the block at one position, behind `previous` there.

        Feed-forward layers after the last attention layer are computed there alone, unless they are known.
        """
        if "stream" in vars(self):
            previous = self.stream[position : position + 1]
        is_known = self.has_attention or "branches" in vars(self)
        branches = tuple(branch.at(position) for branch in self.branches) if is_known else None
        return FrozenBlock(self.block, self.names, self.local_map, previous, branches)

    @cached_property
    def layers(self) -> tuple[FrozenLayer, ...]:
        """Every layer as an affine map of the stream."""
        return tuple(branch.operator if isinstance(branch, FrozenHeads) else branch for branch in self.branches)

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
    norm
        Norm of the final stream, without its divisors, or None.
    unembed
        Map of the normed final stream to logits, or None.
    tokens
        (n,), the sequence; an image (channels, height, width) for a model of images.
    """

    blocks: tuple[FrozenBlock, ...]
    embedding: Array
    embedding_parts: Mapping[str, Array]
    norm: Norm | None
    unembed: Unembedding | None
    tokens: Array

    def __repr__(self) -> str:
        n, d = self.embedding.shape
        branches = [branch.layer for block in self.blocks for branch in block.block.branches]
        heads = [str(layer.n_heads) for layer in branches if isinstance(layer, Attention)]
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
        n_layers = sum(len(block.names) for block in self.blocks)
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
        return self.blocks[-1].stream_after if self.blocks else self.embedding

    @cached_property
    def final_norm(self) -> FrozenNorm | None:
        """Norm of the final stream, or None."""
        return None if self.norm is None else FrozenNorm.on(self.norm, self.stream)

    @property
    def remainders(self) -> dict[str, float]:
        """Norm of the remainder of every feed-forward layer that has one, relative to the norm of its output."""
        return {
            name: float(np.linalg.norm(layer.remainder) / np.linalg.norm(output))
            for block in self.blocks
            for layer, name, output in zip(block.branches, block.names, block.outputs, strict=True)
            if isinstance(layer, FrozenFeedForward) and layer.remainder is not None
        }

    def at(self, position: int) -> FrozenModel:
        """Return the model at one position of the residual stream, for readouts that stay there.

        Attention layers keep the patterns of this query; feed-forward layers act on this position alone.
        """
        here = slice(position, position + 1)
        embedding, blocks = self.embedding[here], list[FrozenBlock]()
        for block in self.blocks:
            blocks.append(block.at(position, blocks[-1] if blocks else embedding))
        parts = {name: part[here] for name, part in self.embedding_parts.items()}
        return replace(self, blocks=tuple(blocks), embedding=embedding, embedding_parts=parts)

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
    parts = {name: part[0] for name, part in weights.embedding.parts_of_stream(checked).items()}
    embedding, blocks = np.asarray(sum(parts.values())), list[FrozenBlock]()
    for block, names in named_blocks(weights.blocks):
        blocks.append(FrozenBlock(block, names, local_map, blocks[-1] if blocks else embedding))
        if blocks[-1].has_attention:
            _ = blocks[-1].stream  # computed from first to last: from last to first is a deep recursion
    return FrozenModel(tuple(blocks), embedding, parts, weights.final_norm, weights.unembed, checked[0])
