"""Load the weights of a model in float64, arranged in blocks as its architecture defines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.architecture import Mlp, by_config, names
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.reference.embedding import PatchEmbedding, TokenEmbedding
from tnlib_adapters.reference.layers import ACTIVATIONS, Affine, FeedForward, Norm, Unembedding

Shape = tuple[int | None, ...]

# Older parameter names, still used by a few checkpoints such as bert-base-uncased.
_NORM_NAMES = (("weight", "bias"), ("gamma", "beta"))


@dataclass(frozen=True)
class Branch:
    """Residual branch: adds behind(layer(before(x))) to the stream x; absent norms are None."""

    layer: Attention | FeedForward
    before: Norm | None
    behind: Norm | None


@dataclass(frozen=True)
class Block:
    """Branches that read the same stream: x -> after(x + sum of the branches)."""

    branches: tuple[Branch, ...]
    after: Norm | None


@dataclass(frozen=True, repr=False)
class Weights:
    """A model in memory, returned by `read_weights`; reuse it for several batches."""

    architecture: str
    embedding: TokenEmbedding | PatchEmbedding
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    unembed: Unembedding | None

    @property
    def context(self) -> int | None:
        """Length of the longest sequence, None if unlimited."""
        layers = (branch.layer for block in self.blocks for branch in block.branches)
        contexts = [layer.context for layer in layers if isinstance(layer, Attention)]
        return min((n for n in (self.embedding.context, *contexts) if n is not None), default=None)

    def __repr__(self) -> str:
        vocab = f"vocab {len(self.embedding.tokens)}, " if isinstance(self.embedding, TokenEmbedding) else ""
        return f"Weights({self.architecture}, {vocab}context {self.context})"


def as_weights(function: str, model: Any) -> Weights:
    """Return the given weights, or load those of a checkpoint."""
    return model if isinstance(model, Weights) else read_weights(as_checkpoint(function, model, "model"))


def read_weights(checkpoint: Checkpoint, *, length: int | None = None) -> Weights:
    """Load a checkpoint for the forward pass; factored attention is multiplied out.

    Parameters
    ----------
    checkpoint
        A checkpoint returned by `open_checkpoint`.
    length
        Sequence length, for rotary embeddings that depend on it.

    Returns
    -------
    Weights
        All weights in float64.

    Raises
    ------
    ArgumentError
        If the activation function in its config is unknown, or `length` exceeds the context of the model.
    FileFormatError
        If a tensor is missing, has an impossible shape, or holds NaN or inf.

    Examples
    --------
    >>> import tnlib_adapters
    >>> read_weights(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    Weights(tnlib_attention_only, vocab 128, context 96)
    """
    row = checkpoint.architecture
    return Weights(
        architecture=row.model_type,
        embedding=_patches(checkpoint) if row.reads == "images" else read_embedding(checkpoint),
        blocks=tuple(block for layer in range(checkpoint.n_layers) for block in _layer(checkpoint, layer, length)),
        final_norm=read_final_norm(checkpoint),
        unembed=read_unembedding(checkpoint),
    )


# ---------------------------------------------------------------------------------- embedding and unembedding


def read_embedding(checkpoint: Checkpoint) -> TokenEmbedding:
    """Load the embedding of a model that reads tokens."""
    row, d = checkpoint.architecture, checkpoint.sizes.d_model
    of_tokens, *others = row.embeddings
    table = _into_stream(checkpoint, _tensor(checkpoint, f"{of_tokens}.weight", (None, None)))
    if table.shape[1] != d:
        raise _misfit(f"{of_tokens}.weight", (None, d), table.shape)
    positions, segments, *_ = [_tensor(checkpoint, f"{name}.weight", (None, d)) for name in others] + [None, None]
    first = by_config(row.first_position, checkpoint.config)
    return TokenEmbedding(
        tokens=table * math.sqrt(d) if row.embedding_scale else table,
        positions=None if positions is None else positions[first:],
        segment=None if segments is None else segments[0],
        norm=_norm(checkpoint, row.embedding_norm),
    )


def _into_stream(checkpoint: Checkpoint, table: Array) -> Array:
    """Return token embeddings with d_model columns."""
    narrow = checkpoint.architecture.narrow
    if narrow is None or not checkpoint.locate(f"{narrow[0]}.weight"):
        return table
    widen = _tensor(checkpoint, f"{narrow[0]}.weight", (checkpoint.sizes.d_model, table.shape[1]))
    return table @ widen.T  # vocab [e] d_model


def _patches(checkpoint: Checkpoint) -> PatchEmbedding:
    d, base = checkpoint.sizes.d_model, checkpoint.architecture.embeddings[0]
    parent = base.split(".")[0]
    kernel = _tensor(checkpoint, f"{base}.weight", (d, None, None, None))
    return PatchEmbedding(
        kernel=kernel,
        bias=_tensor(checkpoint, f"{base}.bias", (d,)),
        first=_tensor(checkpoint, f"{parent}.cls_token", (1, 1, d))[0, 0],
        positions=_tensor(checkpoint, f"{parent}.position_embeddings", (1, None, d))[0],
    )


def read_unembedding(checkpoint: Checkpoint) -> Unembedding | None:
    """Load the unembedding, None for a model without one."""
    row, d = checkpoint.architecture, checkpoint.sizes.d_model
    name = next((n for n in row.unembed if checkpoint.locate(f"{n}.weight")), None)
    tied = row.get(checkpoint.config, "tie_word_embeddings")
    if name is None or (name in row.embeddings and tied is False):
        return None
    weight = _tensor(checkpoint, f"{name}.weight", (None, None)).T  # in vocab
    if row.narrow is not None and checkpoint.locate(f"{row.narrow[1]}.weight"):
        weight = _tensor(checkpoint, f"{row.narrow[1]}.weight", (len(weight), d)).T @ weight  # d_model [e] vocab
    if len(weight) != d:
        raise _misfit(f"{name}.weight", (None, d), weight.shape[::-1])
    bias = _bias(checkpoint, name, weight.shape[1])
    cap = None if row.logit_cap is None else row.stated(checkpoint.config, row.logit_cap)
    return Unembedding(Affine(weight, bias), None if cap is None else float(cap))


def read_final_norm(checkpoint: Checkpoint) -> Norm | None:
    """Load the norm after the last layer, None if there is none."""
    row = checkpoint.architecture
    return _norm(checkpoint, by_config(row.final_norm, checkpoint.config))


# ------------------------------------------------------------------------------------------------------- the layers


def read_attention_norms(checkpoint: Checkpoint, layer: int) -> tuple[Norm | None, Norm | None]:
    """Load the norm before one attention layer and the norm of its output; None where there is none."""
    row = checkpoint.architecture
    norm = None if _normed_after(checkpoint) else _first_norm(checkpoint, row.attention_norm, layer)
    return norm, _behind(checkpoint, row.attention_norm_after, layer)


def _normed_after(checkpoint: Checkpoint) -> bool:
    """Test if the norm of a block follows its residual sum."""
    row = checkpoint.architecture
    return by_config(row.norm_place, checkpoint.config) == "after"


def _layer(checkpoint: Checkpoint, layer: int, length: int | None) -> list[Block]:
    row = checkpoint.architecture
    after = _normed_after(checkpoint)
    attention, norm = _attention(checkpoint, layer, length), _first_norm(checkpoint, row.attention_norm, layer)
    blocks = [_block(attention, norm, _behind(checkpoint, row.attention_norm_after, layer), after)]
    if row.mlp is not None:
        norm, norm_after = _first_norm(checkpoint, row.mlp.norm, layer), _behind(checkpoint, row.mlp.norm_after, layer)
        blocks.append(_block(_feed_forward(checkpoint, row.mlp, layer), norm, norm_after, after))
    parallel = by_config(row.parallel, checkpoint.config)
    return [Block(tuple(b for block in blocks for b in block.branches), None)] if parallel else blocks


def _block(inner: Attention | FeedForward, norm: Norm | None, behind: Norm | None, after: bool) -> Block:
    return Block((Branch(inner, None if after else norm, behind),), norm if after else None)


def _first_norm(checkpoint: Checkpoint, name: str | tuple[str, ...] | None, layer: int) -> Norm | None:
    """Return the first of these norms that exists in the checkpoint."""
    all_names = [n.format(layer=layer) for n in names(name)]
    candidates = (n for n in all_names if any(checkpoint.locate(f"{n}.{weight}") for weight, _ in _NORM_NAMES))
    return _norm(checkpoint, next(candidates, all_names[-1] if all_names else None))


def _behind(checkpoint: Checkpoint, name: str | None, layer: int) -> Norm | None:
    return _norm(checkpoint, None if name is None else name.format(layer=layer))


def _attention(checkpoint: Checkpoint, layer: int, length: int | None) -> Attention:
    attention = checkpoint.attention(layer, length=length)
    wide: dict[str, Any] = {
        name: a.astype(np.float64) for name, a in vars(attention).items() if isinstance(a, np.ndarray)
    }
    if attention.head_norm is not None:
        query, key = (a.astype(np.float64) for a in (attention.head_norm.query, attention.head_norm.key))
        wide["head_norm"] = replace(attention.head_norm, query=query, key=key)
    return replace(attention, **wide)


def _feed_forward(checkpoint: Checkpoint, mlp: Mlp, layer: int) -> FeedForward:
    d, flip = checkpoint.sizes.d_model, checkpoint.architecture.stored == "out_in"
    up = _affine(checkpoint, mlp.up.format(layer=layer), (d, None), flip=flip)
    gate = None
    if mlp.gate == mlp.up:
        gate, up = _halves(up)
    elif mlp.gate is not None:
        gate = _affine(checkpoint, mlp.gate.format(layer=layer), up.weight.shape, flip=flip)
    down = _affine(checkpoint, mlp.down.format(layer=layer), (up.weight.shape[1], d), flip=flip)
    name = checkpoint.architecture.get(checkpoint.config, mlp.activation)
    if name not in tuple(ACTIVATIONS):
        raise ArgumentError(
            f"read_weights: {mlp.activation} in config.json must be one of {', '.join(ACTIVATIONS)}, got {name!r}; "
            "the forward pass knows no other."
        )
    return FeedForward(up, down, ACTIVATIONS[name], gate)


def _halves(both: Affine) -> tuple[Affine, Affine]:
    weights = np.split(both.weight, 2, axis=1)
    biases = [None, None] if both.bias is None else np.split(both.bias, 2)
    first, second = (Affine(w, b) for w, b in zip(weights, biases, strict=True))
    return first, second


# ------------------------------------------------------------------------------------------------------ the tensors


def _affine(checkpoint: Checkpoint, name: str, shape: Shape, *, flip: bool) -> Affine:
    """Load an affine map whose weight has `shape` (in, out), stored as (out, in) if `flip`."""
    weight = _tensor(checkpoint, f"{name}.weight", shape[::-1] if flip else shape)
    weight = weight.T if flip else weight
    return Affine(weight, _bias(checkpoint, name, weight.shape[1]))


def _bias(checkpoint: Checkpoint, name: str, n: int) -> Array | None:
    return _tensor(checkpoint, f"{name}.bias", (n,)) if checkpoint.locate(f"{name}.bias") else None


def _norm(checkpoint: Checkpoint, name: str | None) -> Norm | None:
    if name is None:
        return None
    row = checkpoint.architecture
    eps = None if row.norm_eps is None else row.get(checkpoint.config, row.norm_eps)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise FileFormatError(
            f"read_weights: {row.norm_eps} in config.json must lie between 0 and 1, got {eps!r}; repair it."
        )
    of_weight, of_bias = next((n for n in _NORM_NAMES if checkpoint.locate(f"{name}.{n[0]}")), _NORM_NAMES[0])
    d = checkpoint.sizes.d_model
    weight = _tensor(checkpoint, f"{name}.{of_weight}", (d,))
    if row.norm == "layer":
        return Norm(weight, _tensor(checkpoint, f"{name}.{of_bias}", (d,)), eps)
    return Norm(1 + weight if row.norm == "rms + 1" else weight, None, eps, centred=False)


def _tensor(checkpoint: Checkpoint, name: str, shape: Shape) -> Array:
    """Load a tensor in float64; None in `shape` matches any size."""
    array = checkpoint.read(name)
    if len(array.shape) != len(shape) or any(n not in (None, m) for m, n in zip(array.shape, shape, strict=True)):
        raise _misfit(name, shape, array.shape)
    return array.astype(np.float64)


def _misfit(name: str, shape: Shape, shape_in_file: tuple[int, ...]) -> FileFormatError:
    expected = ", ".join("any" if n is None else str(n) for n in shape)
    return FileFormatError(
        f"read_weights: tensor {name!r} must have shape ({expected}) by config.json, got {shape_in_file}; "
        "one of the two belongs to another model."
    )
