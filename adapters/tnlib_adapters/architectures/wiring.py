"""Wiring of a model: which tensor plays which role, for every layer, the embedding and the unembedding.

`wire` (`resolve_wiring.py`) makes it from a row of the architecture table, a config and the names of the tensors. Names
include the prefix of the checkpoint. A tensor that is missing keeps its name; reading it reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tnlib import FileFormatError
from tnlib_adapters.architectures.architecture import Architecture
from tnlib_adapters.architectures.architecture import Routing as Routing
from tnlib_adapters.architectures.grouped_heads import Sizes
from tnlib_adapters.architectures.rope_scaling import Frequencies


@dataclass(frozen=True)
class Linear:
    """Affine map or lookup table: a weight with the axes (out, in) or (in, out), and a bias or None.

    `name` is the module without the prefix of the checkpoint; `weight` and `bias` are tensor names.
    """

    name: str
    weight: str
    bias: str | None
    stored: Literal["out_in", "in_out"]

    @property
    def module(self) -> str:
        """Module with the prefix of the checkpoint."""
        return self.weight.removesuffix(".weight")

    @property
    def input_axis(self) -> int:
        """Axis of the weight that is contracted with the input."""
        return 1 if self.stored == "out_in" else 0

    @property
    def output_axis(self) -> int:
        """Axis of the weight that becomes the output."""
        return 1 - self.input_axis

    def on_rows(self, weight: Any) -> Any:
        """Return a stored weight, an array or a torch tensor, as (in, out); or one that is (in, out) as stored."""
        return weight.T if self.stored == "out_in" else weight


@dataclass(frozen=True)
class NormWiring:
    """Norm of the residual stream, or of the queries or keys of a head.

    Places: "pre", of the input of a sublayer or of the unembedding; "post", of the stream itself, after the embedding
    or a residual sum; "output", of the output of a sublayer, before the residual sum; "final", of the hidden states in
    which the model ends; "head", of queries or keys; "latent", of latent vectors.
    """

    name: str  # module without the prefix of the checkpoint
    weight: str  # tensor names
    bias: str | None  # None for RMSNorm, and for a LayerNorm of which no bias is stored
    kind: Literal["layer", "rms"]
    offset: float  # added to the stored weight: 1 where the file holds the difference from one
    place: Literal["pre", "post", "output", "final", "head", "latent"]
    eps: float | None  # None if config.json does not state it
    eps_key: str | None

    def required_eps(self, function: str) -> float:
        """Return eps, or raise `FileFormatError` if it is not stated."""
        if self.eps is None:
            raise FileFormatError(f"{function}: config.json must state {self.eps_key}, got None; add it.")
        return self.eps


@dataclass(frozen=True)
class LatentWiring:
    """Queries, keys and values made from low-rank latent vectors: up(norm(down(x))).

    `down` writes the latent vector of keys and values, then the rotated columns of the keys, which all heads share;
    `up` writes for each head the other columns of its keys, then its values. Each head of `query_up` has the columns
    that are rotated last.
    """

    query_down: Linear | None  # None: query_up reads the stream
    query_norm: NormWiring | None
    query_up: Linear
    down: Linear
    norm: NormWiring
    up: Linear
    query_rank: int | None
    rank: int
    n_rotated: int

    @property
    def inputs(self) -> tuple[Linear, ...]:
        """Matrices that read the input of the layer."""
        return (self.query_down or self.query_up, self.down)

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All matrices."""
        return (*([self.query_down] if self.query_down else []), self.query_up, self.down, self.up)

    @property
    def norms(self) -> tuple[NormWiring, ...]:
        """Norms of the latent vectors."""
        return (self.norm,) if self.query_norm is None else (self.query_norm, self.norm)


@dataclass(frozen=True)
class RelativeBiasWiring:
    """Bias of the scores by binned distance."""

    table: Linear  # (bins, heads)
    n_bins: int
    max_distance: int


@dataclass(frozen=True)
class EncoderWiring:
    """Encoder of a model with a decoder: the first layers, whose output the cross-attention of the others reads."""

    n_layers: int
    final_norm: NormWiring | None


@dataclass(frozen=True)
class AttentionWiring:
    """Attention of one layer: its tensors, and the numbers of its scores."""

    sizes: Sizes
    parent: str  # module above the projections, with the prefix of the checkpoint
    projections: Mapping[str, Linear]  # projections that a module holds, in order, such as "q" or "qkv" -> the module
    latent: LatentWiring | None  # in place of "q", "k" and "v" among the projections
    fused: Literal["blocks", "groups"]  # layout of "qkv": q, then k, then v; or by key-value group
    norm: NormWiring | None  # pre-norm or post-norm
    output_norm: NormWiring | None
    head_norms: tuple[NormWiring, ...]  # of queries and of keys; () without
    scale: float
    softcap: float | None
    causal: bool
    encoder: EncoderWiring | None  # whose output keys and values read, in cross-attention
    window: int | None  # in positions, the query's own included
    alibi: tuple[float, ...] | None  # slope of every head
    relative_bias: RelativeBiasWiring | None
    context: int | None  # largest number of positions stated in the config
    pairs: bool  # rotary embeddings rotate adjacent columns, not the two halves of a head
    # (sequence length or None, calling function) -> frequencies of rotary embeddings, None without rotation
    frequencies: Callable[[int | None, str], Frequencies | None] = field(compare=False)

    @property
    def cross(self) -> bool:
        """True if keys and values read the output of the encoder."""
        return self.encoder is not None

    @property
    def group_layout(self) -> tuple[int, int] | None:
        """Number of key heads and width of a head if fused projections are laid out by key head, otherwise None."""
        return (self.sizes.kv_heads, self.sizes.d_head) if self.fused == "groups" else None

    @property
    def pre_norm(self) -> NormWiring | None:
        """Norm of the input, None for models that normalise the stream itself or nothing."""
        return self.norm if self.norm is not None and self.norm.place == "pre" else None

    @property
    def inputs(self) -> tuple[Linear, ...]:
        """Matrices that read the input of the layer."""
        of_memory = ("k", "v") if self.cross else ()
        readers = [linear for names, linear in self.projections.items() if names not in (*of_memory, "o")]
        return (*readers, *(self.latent.inputs if self.latent else ()))

    @property
    def memory_inputs(self) -> tuple[Linear, ...]:
        """Matrices that read the output of the encoder."""
        return (self.projections["k"], self.projections["v"]) if self.cross else ()

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All matrices, each once."""
        return (*(self.latent.matrices if self.latent else ()), *self.projections.values())


@dataclass(frozen=True)
class FeedForwardWiring:
    """Feed-forward layer: down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    up: Linear
    down: Linear
    gate: Linear | None  # equal to `up` where one matrix holds both, the gate first
    activation: str | None  # None if config.json does not state it
    activation_key: str
    norm: NormWiring | None  # pre-norm or post-norm
    output_norm: NormWiring | None

    @property
    def inputs(self) -> tuple[Linear, ...]:
        """Matrices that read the input of the layer, each once."""
        return (self.up,) if self.gate is None or self.gate == self.up else (self.gate, self.up)

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All matrices, each once."""
        return (*self.inputs, self.down)


@dataclass(frozen=True)
class ExpertsWiring:
    """Mixture of experts: weighted sum of `n_chosen` feed-forward layers, chosen by the router, plus the shared one.

    A loaded transformers model holds the experts of a layer in one tensor, so that their names are not found there.
    """

    router: Linear
    experts: tuple[FeedForwardWiring, ...]  # their norms are the one of the mixture
    n_chosen: int
    routing: Routing
    correction: str | None  # tensor (experts,) added to the scores for the choice of experts, not to their weights
    shared: FeedForwardWiring | None

    @property
    def norm(self) -> NormWiring | None:
        """Pre-norm or post-norm."""
        return self.experts[0].norm

    @property
    def output_norm(self) -> NormWiring | None:
        """Norm of the output, before the residual sum."""
        return self.experts[0].output_norm

    @property
    def inputs(self) -> tuple[Linear, ...]:
        """Matrices that read the input of the layer."""
        return (self.router, *(matrix for layer in self.feed_forward_layers for matrix in layer.inputs))

    @property
    def feed_forward_layers(self) -> tuple[FeedForwardWiring, ...]:
        """All experts, the shared one last."""
        return (*self.experts, *([self.shared] if self.shared else []))


@dataclass(frozen=True)
class LayerWiring:
    """One layer, with a feed-forward layer, with experts or without both; if `parallel`, all read the same stream.

    A block of a decoder is two layers: its own attention, then the cross-attention with the feed-forward layer.
    """

    module: str  # with the prefix of the checkpoint
    attention: AttentionWiring
    feed_forward: FeedForwardWiring | None
    experts: ExpertsWiring | None
    parallel: bool

    @property
    def second(self) -> FeedForwardWiring | ExpertsWiring | None:
        """Sublayer beside the attention."""
        return self.feed_forward or self.experts

    @property
    def feed_forward_matrices(self) -> tuple[Linear, ...]:
        """All matrices of the feed-forward layer; () without one, or with experts."""
        return self.feed_forward.matrices if self.feed_forward else ()

    @property
    def latent_matrices(self) -> tuple[Linear, ...]:
        """All matrices of attention on latent vectors, which are factored one by one; () for other attention."""
        return self.attention.matrices if self.attention.latent else ()

    @property
    def feed_forward_layers(self) -> tuple[FeedForwardWiring, ...]:
        """Feed-forward layer or experts."""
        if self.experts is not None:
            return self.experts.feed_forward_layers
        return (self.feed_forward,) if self.feed_forward else ()


@dataclass(frozen=True)
class EmbeddingWiring:
    """Embedding of tokens or patches."""

    table: Linear  # token embeddings (vocab, width), or the convolution kernel of patches (d_model, channels, p, p)
    positions: str | None  # tensors of learned positions, of segments, of the learned vector before the patches
    segments: str | None
    class_token: str | None
    widen: Linear | None  # map of narrower token embeddings to d_model
    scale: float  # factor of token embeddings
    first_position: int  # row of the position embeddings for the first token
    padding: int | None  # token that takes no position and reads the row of this number
    norm: NormWiring | None  # post-norm of the sum
    shared: bool  # several modules of a loaded model hold the table


@dataclass(frozen=True)
class UnembeddingWiring:
    """Unembedding, the map from the final stream to logits.

    If `tied`, the matrix equals the token embeddings by config.json, and the checkpoint may hold a copy of them; if
    `shared`, it is the same tensor.
    """

    linear: Linear  # (vocab, width)
    tied: bool
    shared: bool
    own_weight: str  # tensor name for weights of its own
    narrow: Linear | None  # map of the final stream to the width of narrower embeddings
    logit_cap: float | None
    scale: float  # factor of the logits

    @property
    def reader(self) -> Linear:
        """Map that reads the final stream."""
        return self.narrow or self.linear

    @property
    def key(self) -> str:
        """Key of this use of the matrix in calibration statistics: of a shared table, `linear.name` is the look-up."""
        return f"{self.linear.name}.unembedding" if self.shared else self.linear.name


@dataclass(frozen=True)
class Wiring:
    """Structure of a model as its architecture, its config and its tensor names determine it; no tensor is read."""

    architecture: Architecture
    reads: Literal["tokens", "images"]
    prefix: str  # of tensor names in this checkpoint
    sizes: Sizes
    embedding: EmbeddingWiring
    layers: tuple[LayerWiring, ...]
    final_norm: NormWiring | None
    unembedding: UnembeddingWiring | None  # None for a model that ends in hidden states
    masked_head: str | None  # module of a head that predicts masked tokens by the embeddings, if it is stored
    in_memory: Mapping[str, str]  # part of a stored name -> its name in a loaded transformers model

    @property
    def model_type(self) -> str:
        """Name of the architecture."""
        return self.architecture.model_type

    @property
    def context(self) -> int | None:
        """Largest number of positions stated in the config."""
        return self.layers[0].attention.context

    @property
    def encoder(self) -> EncoderWiring | None:
        """Encoder of a model with a decoder; None for a model of one stack, which is all layers."""
        return self.layers[-1].attention.encoder

    @property
    def attention_modules(self) -> list[str]:
        """Modules above the projections of each layer, without the prefix."""
        return [layer.attention.parent.removeprefix(self.prefix) for layer in self.layers]

    @property
    def modules_by_block(self) -> list[list[str]]:
        """Modules of the matrices of every block, the attention module first, without the prefix."""
        return [
            [module, *(linear.name for linear in (*layer.latent_matrices, *layer.feed_forward_matrices))]
            for module, layer in zip(self.attention_modules, self.layers, strict=True)
        ]

    @property
    def is_attention_only(self) -> bool:
        """True of a model without norms and feed-forward layers."""
        return all(not layer.feed_forward_layers and layer.attention.norm is None for layer in self.layers)

    @cached_property
    def matrices(self) -> Mapping[str, Linear]:
        """Matrices that are factored one by one, by module name.

        Those of attention on latent vectors, of feed-forward layers, the embedding, and an unembedding of its own.
        """
        matrices = [m for layer in self.layers for m in (*layer.latent_matrices, *layer.feed_forward_matrices)]
        head = [] if self.unembedding is None or self.unembedding.shared else [self.unembedding.linear]
        return {matrix.name: matrix for matrix in (*matrices, self.embedding.table, *head)}

    def is_embedding(self, name: str) -> bool:
        """Test if the module of this name, without a prefix, is the table of token embeddings."""
        return name == self.embedding.table.name

    def is_unembedding(self, name: str) -> bool:
        """Test if a module of this name, without a prefix, is an unembedding with a matrix of its own.

        A loaded model may name it otherwise than its file: "lm_head" and "embed_out" of GPT-NeoX.
        """
        return name in self.architecture.unembed and not self.is_embedding(name)

    def matrix(self, name: str) -> Linear:
        """Return a matrix outside attention and experts, by its name in a file or in a loaded model."""
        unembedding = self.unembedding if self.is_unembedding(name) else None
        return self.matrices[name] if unembedding is None else unembedding.linear

    @property
    def untied_config(self) -> dict[str, bool]:
        """Config values of the same model with an unembedding of its own: the logits keep their scale."""
        decoder, unembedding = self.architecture.decoder, self.unembedding
        scaled = {decoder.scaled_logits: unembedding.scale != 1} if decoder is not None and unembedding else {}
        return {"tie_word_embeddings": False} | scaled

    @property
    def tied_key(self) -> str | None:
        """Key of the predictions in calibration statistics if the embedding also makes them, otherwise None."""
        return self.unembedding.key if self.unembedding is not None and self.unembedding.shared else None
