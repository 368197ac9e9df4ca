"""Frozen models: patterns, norm divisors and feed-forward slopes of one sequence, or given patterns alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args, overload

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._html import facts, heat_image
from tnlib._typing import Array
from tnlib._validate import as_array, check_choice, is_list
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.frozen_attention import FrozenAttention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_checkpoint
from tnlib_adapters.frozen.frozen_feed_forward import FrozenFeedForward, LocalMap, freeze_feed_forward
from tnlib_adapters.frozen.frozen_heads import FrozenHeads, FrozenNorm, freeze_heads
from tnlib_adapters.frozen.frozen_stack import FrozenPaths, FrozenStack
from tnlib_adapters.reference.layers import Norm, Unembedding
from tnlib_adapters.reference.weights import ResidualBlock, Weights, as_weights, named_blocks

_MOST_CELLS = 48  # rows of a pattern in a picture of all heads


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

    block: ResidualBlock
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
        return FrozenNorm.of(self.block.after, self.stream + sum(branch.output for branch in self.branches))

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
    def layers(self) -> tuple[FrozenAttention | FrozenFeedForward, ...]:
        """Every layer as an affine map of the stream."""
        return tuple(branch.operator if isinstance(branch, FrozenHeads) else branch for branch in self.branches)

    def linear(self, x: Array) -> Array:
        """Return the linear part for x (n, d_model)."""
        y = x + sum(branch.linear(x) for branch in self.branches)
        return y if self.after is None else self.after.linear(y)

    def apply(self, x: Array) -> Array:
        """Return the affine map for x (n, d_model): for `stream`, the stream after the block."""
        y: Array = x + sum(branch.apply(x) for branch in self.branches)
        return y if self.after is None else self.after.apply(y)


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

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("known_circuit"))
    >>> frozen = tnlib_adapters.freeze(model, [5, 6, 7, 5, 6])
    >>> frozen
    FrozenModel(2 layers of 4, 4 heads, 2 feed-forward layers, on 5 positions x 32 features)
    >>> len(frozen.blocks), bool(np.allclose(frozen.apply(frozen.embedding), frozen.stream))
    (4, True)
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
            name: float(np.linalg.norm(layer.remainder) / np.linalg.norm(layer.output))
            for block in self.blocks
            for layer, name in zip(block.branches, block.names, strict=True)
            if layer.remainder is not None
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
    checked = weights.one_sequence(function, tokens)
    parts = {name: part[0] for name, part in weights.embedding.parts_of_stream(checked).items()}
    embedding, blocks = np.asarray(sum(parts.values())), list[FrozenBlock]()
    for block, names in named_blocks(weights.blocks):
        blocks.append(FrozenBlock(block, names, local_map, blocks[-1] if blocks else embedding))
        if blocks[-1].has_attention:
            _ = blocks[-1].stream  # computed from first to last: from last to first is a deep recursion
    return FrozenModel(tuple(blocks), embedding, parts, weights.final_norm, weights.unembed, checked[0])


__all__ = ["FrozenModel", "FrozenPaths", "FrozenStack", "freeze"]


@overload
def freeze(checkpoint: Checkpoint, tokens: Sequence[Array], *, feed_forward: LocalMap = "secant") -> FrozenStack: ...
@overload
def freeze(
    checkpoint: Checkpoint | Weights, tokens: ArrayLike, *, feed_forward: LocalMap = "secant"
) -> FrozenModel: ...
@overload
def freeze(checkpoint: Checkpoint, *, patterns: Sequence[Array]) -> FrozenStack: ...
@accepts_models
def freeze(
    checkpoint: Checkpoint | Weights, tokens: Any = None, *, patterns: Any = None, feed_forward: LocalMap = "secant"
) -> FrozenStack | FrozenModel:
    """Return a model on one sequence as an affine map of its residual stream: all patterns and norm divisors frozen.

    Parameters
    ----------
    checkpoint
        A checkpoint or transformers model of any architecture with one residual stream, or loaded `Weights`.
    tokens
        (n,), integers, or a text: the sequence, without padding, because every token is attended to. A single image
        (channels, height, width) for a model of images.
    patterns
        In place of `tokens`, or in their position, for an attention-only model without norms: per layer (heads, n, n),
        attention weights, rows summing to one.
    feed_forward
        Linear map of a feed-forward layer at each position. "secant": activations :math:`a(u) = s u` with
        :math:`s = a(u) / u` frozen, or the open gates frozen, which leaves no remainder. "jacobian": the derivative,
        which leaves one.

    Returns
    -------
    FrozenModel
        For `patterns` a `FrozenStack`.

    Raises
    ------
    ArgumentError
        If the tokens are not one sequence that fits the model, or patterns do not fit it or are given for a model with
        norms or feed-forward layers.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> frozen = freeze(llama, [5, 6, 7, 5, 6])
    >>> stream = run(llama, [5, 6, 7, 5, 6]).residuals[-1][0]
    >>> stream.shape, f"{np.abs(frozen.apply(frozen.embedding) - stream).max():.4f}"
    ((5, 128), '0.0000')

    With patterns:

    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> forward = run(model, [5, 6, 7, 5, 6])
    >>> stack = freeze(model, [of_layer[0] for of_layer in forward.patterns])
    >>> embedding, stream = forward.residuals[0][0], forward.residuals[-1][0]
    >>> f"{np.abs(stack.apply(embedding) - stream).max():.4f}"
    '0.0000'
    """
    check_choice("freeze", "feed_forward", feed_forward, get_args(LocalMap))
    if (tokens is None) == (patterns is None):
        count = "neither" if tokens is None else "both"
        raise ArgumentTypeError(f"freeze: tokens or patterns must be given, got {count}; pass one sequence of tokens.")
    if patterns is None and not _are_patterns(tokens):
        return freeze_weights("freeze", as_weights("freeze", checkpoint, "checkpoint"), tokens, feed_forward)
    return _freeze_patterns(checkpoint, tokens if patterns is None else patterns)


def _are_patterns(value: Any) -> bool:
    """Test if the second argument is a list of arrays with legs, not token numbers or an image."""
    return isinstance(value, list | tuple) and any(np.ndim(entry) > 1 for entry in value)


def _freeze_patterns(checkpoint: Any, patterns: Any) -> FrozenStack:
    wiring = as_checkpoint("freeze", checkpoint).wiring
    if not wiring.is_attention_only:
        raise ArgumentError(
            f"freeze: checkpoint must be an attention-only model without norms for patterns, got a "
            f"{wiring.model_type}, whose norms and feed-forward layers are not linear; pass tokens, or freeze one "
            "layer with checkpoint.attention(layer).frozen(...)."
        )
    if not is_list(patterns) or len(patterns) != checkpoint.n_layers:
        received = len(patterns) if is_list(patterns) else type(patterns).__name__
        raise ArgumentError(
            f"freeze: patterns must be one array per layer, {checkpoint.n_layers}, got {received}; "
            "pass the patterns of one sequence."
        )
    checked = [as_array("freeze", f"patterns of layer {layer}", a) for layer, a in enumerate(patterns)]
    for layer, a in enumerate(checked):
        _check_pattern(layer, a, (checkpoint.sizes.n_heads, *checked[0].shape[-1:] * 2))
    return FrozenStack([checkpoint.attention(layer).frozen(a) for layer, a in enumerate(checked)])


def _check_pattern(layer: int, a: Array, shape: tuple[int, ...]) -> None:
    if a.shape != shape:
        raise ArgumentError(
            f"freeze: patterns of layer {layer} must have shape (heads, n, n) = {shape}, got {a.shape}; "
            "pass those of one sequence, the same in all layers."
        )
    sums = a.sum(axis=2)
    off = np.abs(sums - 1)
    if off.max() > 1e-3:  # accuracy of half precision
        head, i = np.unravel_index(off.argmax(), off.shape)
        raise ArgumentError(
            f"freeze: patterns of layer {layer} must have rows that sum to one, got {sums[head, i]:.4g} in row {i} of "
            f"head {head}; pass what softmax returned, or build layers of any weights with Attention.frozen."
        )
