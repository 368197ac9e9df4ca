"""Load the weights of a model in one precision, arranged in blocks as its architecture defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib._validate import as_real_dtype
from tnlib_adapters.architectures.wiring import (
    AttentionWiring,
    ExpertsWiring,
    FeedForwardWiring,
    LayerWiring,
    Linear,
    NormWiring,
)
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_checkpoint, two_streams
from tnlib_adapters.reference.embedding import Padding, PatchEmbedding, TokenEmbedding
from tnlib_adapters.reference.layers import (
    ACTIVATIONS,
    Affine,
    FeedForward,
    MixtureOfExperts,
    Norm,
    Unembedding,
    normed,
)

Shape = tuple[int | None, ...]
_DOUBLE: np.dtype[Any] = np.dtype(np.float64)


@dataclass(frozen=True)
class Branch:
    """Residual branch: adds behind(layer(before(x))) to the stream x; absent norms are None."""

    layer: Attention | FeedForward | MixtureOfExperts
    before: Norm | None
    behind: Norm | None


@dataclass(frozen=True)
class ResidualBlock:
    """Branches that read the same stream: x -> after(x + sum of the branches)."""

    branches: tuple[Branch, ...]
    after: Norm | None

    def run(self, x: Array, attend: Callable[[Attention, Array], Array]) -> Array:
        """Return the stream after the block, same shape as x; `attend` returns the output of attention on its input."""
        added = np.zeros_like(x)
        for branch in self.branches:
            read, layer = normed(branch.before, x), branch.layer
            written = attend(layer, read) if isinstance(layer, Attention) else layer(read)
            added += normed(branch.behind, written)
        return normed(self.after, x + added)


def named_blocks(blocks: Iterable[ResidualBlock]) -> Iterator[tuple[ResidualBlock, tuple[str, ...]]]:
    """Yield blocks with the names of their branches: "3" for attention 3, "mlp 3" for feed-forward layer 3."""
    n_before = {"": 0, "mlp ": 0}
    for block in blocks:
        names = []
        for branch in block.branches:
            kind = "" if isinstance(branch.layer, Attention) else "mlp "
            names.append(f"{kind}{n_before[kind]}")
            n_before[kind] += 1
        yield block, tuple(names)


def attention_layers(blocks: Iterable[ResidualBlock]) -> Iterator[Attention]:
    """Yield the attention layers of blocks, one after the other: blocks may be read when they are used."""
    yield from (branch.layer for block in blocks for branch in block.branches if isinstance(branch.layer, Attention))


class StoredBlocks(Sequence[ResidualBlock]):
    """Blocks that are read whenever they are used, so that one is in memory at a time."""

    def __init__(self, readers: Sequence[Callable[[], ResidualBlock]]) -> None:
        self._readers = readers

    @overload
    def __getitem__(self, k: int) -> ResidualBlock: ...
    @overload
    def __getitem__(self, k: slice) -> StoredBlocks: ...
    def __getitem__(self, k: int | slice) -> ResidualBlock | StoredBlocks:
        return StoredBlocks(self._readers[k]) if isinstance(k, slice) else self._readers[k]()

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True, repr=False)
class Weights:
    """A model returned by `read_weights`; reuse it for several batches."""

    architecture: str
    embedding: TokenEmbedding | PatchEmbedding
    blocks: Sequence[ResidualBlock]
    final_norm: Norm | None
    unembed: Unembedding | None
    context: int | None  # length of the longest sequence, None if unlimited
    encoder: Sequence[ResidualBlock] = ()  # of a model with a decoder, whose blocks read its output
    encoder_norm: Norm | None = None

    @property
    def n_attention_layers(self) -> int:
        """Number of attention layers."""
        return sum(1 for _ in attention_layers(self.blocks))

    def one_sequence(self, function: str, tokens: Any) -> Array:
        """Return the tokens of one sequence, (1, n), validated."""
        checked = self.embedding.check(function, tokens, self.context)
        if len(checked) != 1:
            raise ArgumentError(f"{function}: tokens must be one sequence, got {len(checked)}; pass one at a time.")
        return checked

    def __repr__(self) -> str:
        vocab = f"vocab {len(self.embedding.tokens)}, " if isinstance(self.embedding, TokenEmbedding) else ""
        return f"Weights({self.architecture}, {vocab}context {self.context})"


def as_weights(function: str, model: Any, parameter: str = "model", *, with_decoder: bool = False) -> Weights:
    """Return the given weights, or load those of a checkpoint; refuse encoder and decoder unless `with_decoder`."""
    weights = model if isinstance(model, Weights) else read_weights(as_checkpoint(function, model, parameter))
    if weights.encoder and not with_decoder:
        raise two_streams(function, parameter, f"a {weights.architecture}")
    return weights


def as_unembedding(function: str, weights: Weights) -> Unembedding:
    """Return the unembedding of a model; raise `ArgumentError` if it has none."""
    if weights.unembed is None:
        raise ArgumentError(
            f"{function}: model must have an unembedding, got a {weights.architecture}, which ends in hidden states; "
            "use a language model."
        )
    return weights.unembed


@accepts_models
def read_weights(
    checkpoint: Checkpoint, *, length: int | None = None, in_memory: bool = True, dtype: DTypeLike = np.float64
) -> Weights:
    """Load a checkpoint for the forward pass; factored attention is multiplied out.

    Parameters
    ----------
    checkpoint
        A checkpoint or transformers model.
    length
        Sequence length, for rotary embeddings that depend on it.
    in_memory
        False to read every block whenever it is used, for a model that does not fit in memory.
    dtype
        Precision of all weights, and so of the forward pass.

    Raises
    ------
    ArgumentError
        If the activation function in its config is unknown, `length` exceeds the context of the model, or `dtype` is
        neither float32 nor float64.
    FileFormatError
        If a tensor is missing, has an impossible shape, or holds NaN or inf.

    Examples
    --------
    >>> import tnlib_adapters
    >>> read_weights(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    Weights(tnlib_attention_only, vocab 128, context 96)
    """
    wiring = as_checkpoint("read_weights", checkpoint).wiring
    tensors = _Tensors(checkpoint, as_real_dtype("read_weights", dtype))
    n_encoder = 0 if wiring.encoder is None else wiring.encoder.n_layers

    def blocks(layers: Sequence[int]) -> Sequence[ResidualBlock]:
        readers = [read for k in layers for read in _readers(tensors, k, length)]
        return tuple(read() for read in readers) if in_memory else StoredBlocks(readers)

    encoder, after_encoder = blocks(range(n_encoder)), blocks(range(n_encoder, checkpoint.n_layers))
    if in_memory:
        contexts = [layer.context for layer in attention_layers((*encoder, *after_encoder))]
    else:
        contexts = [checkpoint.head(k, 0, length=length).context for k in range(checkpoint.n_layers)]
    embedding = _patches(tensors) if wiring.reads == "images" else read_embedding(checkpoint, tensors.dtype)
    table = None if isinstance(embedding, PatchEmbedding) else embedding.tokens
    return Weights(
        architecture=wiring.model_type,
        embedding=embedding,
        blocks=after_encoder,
        final_norm=tensors.norm(wiring.final_norm),
        unembed=read_unembedding(checkpoint, table, tensors.dtype),
        context=min((n for n in (embedding.context, *contexts) if n is not None), default=None),
        encoder=encoder,
        encoder_norm=None if wiring.encoder is None else tensors.norm(wiring.encoder.final_norm),
    )


# ---------------------------------------------------------------------------------- embedding and unembedding


def read_embedding(checkpoint: Checkpoint, dtype: np.dtype[Any] = _DOUBLE) -> TokenEmbedding:
    """Load the embedding of a model that reads tokens."""
    tensors, embedding, d = _Tensors(checkpoint, dtype), checkpoint.wiring.embedding, checkpoint.sizes.d_model
    table = tensors.read(embedding.table.weight, (None, None))
    if embedding.widen is not None:
        table = table @ tensors.read(embedding.widen.weight, (d, table.shape[1])).T  # vocab [e] d_model
    if table.shape[1] != d:
        raise _misfit(embedding.table.weight, (None, d), table.shape)
    positions, segments = (
        None if name is None else tensors.read(name, (None, d)) for name in (embedding.positions, embedding.segments)
    )
    return TokenEmbedding(
        tokens=table * embedding.scale if embedding.scale != 1 else table,
        positions=None if positions is None else positions[embedding.first_position :],
        padding=None
        if embedding.padding is None or positions is None
        else Padding(embedding.padding, positions[embedding.padding]),
        segment=None if segments is None else segments[0],
        norm=tensors.norm(embedding.norm),
        folder=checkpoint.folder.path,
    )


def _patches(tensors: _Tensors) -> PatchEmbedding:
    embedding, d = tensors.checkpoint.wiring.embedding, tensors.d_model
    kernel = tensors.read(embedding.table.weight, (d, None, None, None))
    return PatchEmbedding(
        kernel=kernel,
        bias=tensors.read(f"{embedding.table.module}.bias", (d,)),
        first=tensors.read(str(embedding.class_token), (1, 1, d))[0, 0],
        positions=tensors.read(str(embedding.positions), (1, None, d))[0],
    )


def read_unembedding(
    checkpoint: Checkpoint, table: Array | None = None, dtype: np.dtype[Any] = _DOUBLE
) -> Unembedding | None:
    """Load the unembedding, None for a model without one.

    A tied one is a view of the embeddings, if `table` holds them as they are.
    """
    tensors, wiring, d = _Tensors(checkpoint, dtype), checkpoint.wiring, checkpoint.sizes.d_model
    unembedding, embedding = wiring.unembedding, wiring.embedding
    if unembedding is None:
        return None
    name, cap = unembedding.linear.weight, unembedding.logit_cap
    is_shared = table is not None and name == embedding.table.weight and embedding.widen is None
    if table is None or not is_shared or embedding.scale != 1:
        table = tensors.read(name, (None, None))
    weight = table.T  # in vocab
    if unembedding.narrow is not None:
        narrow = tensors.read(unembedding.narrow.weight, (len(weight), d))
        weight = narrow.T @ weight  # d_model [e] vocab
    if len(weight) != d:
        raise _misfit(name, (None, d), weight.shape[::-1])
    weight = weight * unembedding.scale if unembedding.scale != 1 else weight
    bias = tensors.bias(unembedding.linear, weight.shape[1])
    return Unembedding(Affine(weight, bias), None if cap is None else float(cap))


# ------------------------------------------------------------------------------------------------------- the layers


def _readers(tensors: _Tensors, k: int, length: int | None) -> list[Callable[[], ResidualBlock]]:
    """Return functions that read the blocks of a layer."""
    layer: LayerWiring = tensors.checkpoint.wiring.layers[k]
    readers: list[Callable[[], ResidualBlock]] = [
        lambda: _block(tensors, tensors.checkpoint.attention(k, length=length).astype(tensors.dtype), layer.attention)
    ]
    feed_forward, experts = layer.feed_forward, layer.experts
    if feed_forward is not None:
        readers.append(lambda: _block(tensors, _feed_forward(tensors, feed_forward), feed_forward))
    if experts is not None:
        readers.append(lambda: _block(tensors, _experts(tensors, experts), experts))
    if not layer.parallel:
        return readers
    return [lambda: ResidualBlock(tuple(branch for read in readers for branch in read().branches), None)]


def _block(
    tensors: _Tensors,
    inner: Attention | FeedForward | MixtureOfExperts,
    wiring: AttentionWiring | FeedForwardWiring | ExpertsWiring,
) -> ResidualBlock:
    norm, behind = (tensors.norm(norm_wiring) for norm_wiring in (wiring.norm, wiring.output_norm))
    after = wiring.norm is not None and wiring.norm.place == "post"
    return ResidualBlock((Branch(inner, None if after else norm, behind),), norm if after else None)


def _experts(tensors: _Tensors, wiring: ExpertsWiring) -> MixtureOfExperts:
    return MixtureOfExperts(
        router=tensors.affine(wiring.router, (tensors.d_model, len(wiring.experts))),
        experts=tuple(_feed_forward(tensors, expert) for expert in wiring.experts),
        n_chosen=wiring.n_chosen,
        routing=wiring.routing,
        correction=None if wiring.correction is None else tensors.read(wiring.correction, (len(wiring.experts),)),
        shared=None if wiring.shared is None else _feed_forward(tensors, wiring.shared),
    )


def _feed_forward(tensors: _Tensors, wiring: FeedForwardWiring) -> FeedForward:
    d = tensors.d_model
    up = tensors.affine(wiring.up, (d, None))
    gate = None
    if wiring.gate == wiring.up:
        gate, up = _halves(up)
    elif wiring.gate is not None:
        gate = tensors.affine(wiring.gate, up.weight.shape)
    down = tensors.affine(wiring.down, (up.weight.shape[1], d))
    if wiring.activation not in tuple(ACTIVATIONS):
        raise ArgumentError(
            f"read_weights: {wiring.activation_key} in config.json must be one of {', '.join(ACTIVATIONS)}, "
            f"got {wiring.activation!r}; the forward pass knows no other."
        )
    return FeedForward(up, down, ACTIVATIONS[wiring.activation], gate)


def _halves(both: Affine) -> tuple[Affine, Affine]:
    weights = np.split(both.weight, 2, axis=1)
    biases = [None, None] if both.bias is None else np.split(both.bias, 2)
    first, second = (Affine(w, b) for w, b in zip(weights, biases, strict=True))
    return first, second


# ------------------------------------------------------------------------------------------------------ the tensors


def read_norm(checkpoint: Checkpoint, wiring: NormWiring | None) -> Norm | None:
    """Load a norm of the stream in float64, None for None."""
    return _Tensors(checkpoint).norm(wiring)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a checkpoint, read in one precision."""

    checkpoint: Checkpoint
    dtype: np.dtype[Any] = _DOUBLE

    @property
    def d_model(self) -> int:
        """Dimension of the residual stream."""
        return self.checkpoint.sizes.d_model

    def norm(self, wiring: NormWiring | None) -> Norm | None:
        """Load a norm of the stream, None for None."""
        if wiring is None:
            return None
        eps, shape = wiring.required_eps("read_weights"), (self.d_model,)
        weight = wiring.offset + self.read(wiring.weight, shape)
        if wiring.kind == "rms":
            return Norm(weight, None, eps, centred=False)
        return Norm(weight, self.read(wiring.bias or f"{wiring.name}.bias", shape), eps)

    def affine(self, linear: Linear, shape: Shape) -> Affine:
        """Load an affine map whose weight has `shape` (in, out)."""
        weight = linear.on_rows(self.read(linear.weight, shape[::-1] if linear.stored == "out_in" else shape))
        return Affine(weight, self.bias(linear, weight.shape[1]))

    def bias(self, linear: Linear, n: int) -> Array | None:
        """Load the bias (n,) of a map, None if it has none."""
        return None if linear.bias is None else self.read(linear.bias, (n,))

    def read(self, name: str, shape: Shape) -> Array:
        """Load a tensor; None in `shape` matches any size."""
        array = self.checkpoint.read(name)
        if len(array.shape) != len(shape) or any(n not in (None, m) for m, n in zip(array.shape, shape, strict=True)):
            raise _misfit(name, shape, array.shape)
        return array.astype(self.dtype, copy=False)


def _misfit(name: str, shape: Shape, shape_in_file: tuple[int, ...]) -> FileFormatError:
    expected = ", ".join("any" if n is None else str(n) for n in shape)
    return FileFormatError(
        f"read_weights: tensor {name!r} must have shape ({expected}) by config.json, got {shape_in_file}; "
        "one of the two belongs to another model."
    )
