"""Row type of the architecture table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Settings = Mapping[str, Any]  # typed values of the config keys that a row reads
T = TypeVar("T")
Names = tuple[str, ...]  # alternative module names; the first that exists is used


def inverse_root(settings: Settings, layer: int, d_head: int) -> float:
    """Return the default score scale, 1 / sqrt(d_head)."""
    return 1.0 / math.sqrt(d_head)


@dataclass(frozen=True)
class Mlp:
    """Feed-forward layer: down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    up: str
    down: str
    norm: str | Names
    activation: str  # config key of the activation function
    gate: str | None = None  # the same module as `up` where one matrix holds both, the gate first
    norm_after: str | None = None  # norm of the output, before the residual sum


def all_layers(settings: Settings, layer: int) -> bool:
    """Return True, whatever the layer."""
    return True


@dataclass(frozen=True)
class Routing:
    """Weights of the experts at a position, from the logits of the router.

    Scores are the softmax or the sigmoid of the logits. Consecutive experts form `n_groups` groups of equal size. The
    `n_chosen_groups` groups with the largest sum of their `n_best` largest scores are kept, and within them the experts
    of largest scores are chosen. Their weights are their scores times `factor`.
    """

    normalised: bool = True  # scores of the chosen experts are divided by their sum
    scores: Literal["softmax", "sigmoid"] = "softmax"
    n_groups: int = 1
    n_chosen_groups: int = 1
    n_best: int = 1
    factor: float = 1.0


def normalised_routing(settings: Settings) -> Routing:
    """Return the routing with weights of the chosen experts that sum to one, whatever the config."""
    return Routing()


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: feed-forward layers of which a router chooses and weights a few at every position."""

    router: str
    expert: Mlp  # patterns with {layer} and {expert}
    n_experts: str  # config keys
    n_chosen: str
    routing: Callable[[Settings], Routing] = normalised_routing
    correction: str | None = None  # tensor added to the scores for the choice of experts, not to their weights
    shared: Mlp | None = None  # feed-forward layer of all positions, added to the experts; with the norms of `expert`
    in_layer: Callable[[Settings, int], bool] = all_layers  # other layers have the feed-forward layer of the row


@dataclass(frozen=True)
class Latent:
    """Modules, below the attention, of queries, keys and values made from low-rank latent vectors, and config keys.

    A down map of the stream is normalised, and an up map writes the heads. The down map of keys and values writes,
    after the latent vector, the rotated columns of the keys, which all heads share; the up map writes for each head its
    other columns of the keys, then its values.
    """

    query: str  # in place of the down and up maps where there is no `query_rank`
    query_down: str
    query_norm: str
    query_up: str
    down: str
    norm: str
    up: str
    query_rank: str  # config keys
    rank: str
    d_plain: str  # columns of a head that are not rotated, and those that are
    d_rotated: str
    d_value: str
    eps: float = 1e-6  # of the norms, whatever the config says


@dataclass(frozen=True)
class Rope:
    """Config keys of the rotary embeddings, besides `rope_parameters` or `rope_scaling`.

    With 2F rotated columns, frequency f rotates columns f and F + f of a head, or columns 2f and 2f + 1 if the layout
    is "pairs".
    """

    layout: Literal["halves", "pairs"] | Callable[[Settings], Literal["halves", "pairs"]] = "halves"
    theta: str = "rope_theta"  # config keys
    sliding_theta: str | None = None  # of layers with a window, where configs that do not list layers apart have it
    fraction: str = "partial_rotary_factor"
    n_columns: str | None = None  # key of the number of rotated columns, in place of a fraction
    fraction_default: float = 1.0
    unless: str | None = None  # key that disables the rotation


@dataclass(frozen=True)
class RelativeBiasKeys:
    """Bias of the scores by binned distance: a table (bins, heads) that all layers share."""

    table: str
    n_bins: str  # config keys
    max_distance: str


@dataclass(frozen=True)
class Decoder:
    """Second stack, whose layers also attend to the output of the encoder, before their feed-forward layer."""

    stack: Architecture  # names and settings of its layers, its final norm and the unembedding
    cross_attention: str  # parent module of the projections, named as those of the other attention
    cross_norm: str
    scaled_logits: str  # config key: logits are divided by sqrt(d_model); if missing, where embeddings are tied


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Tensor names, storage layout and structure of one family of checkpoints.

    Tensor names are patterns with {layer} for the layer number. A module has tensors `<name>.weight` and, optionally,
    `<name>.bias`.
    """

    model_type: str
    n_layers: str = "num_hidden_layers"  # config keys
    n_heads: str = "num_attention_heads"
    d_model: str = "hidden_size"
    attention: str  # parent module of the attention tensors of a layer
    projections: Mapping[str, str]  # module below `attention` -> the projections it holds, in order: "q", "qkv", ...
    stored: Literal["out_in", "in_out"]  # legs of every weight; "in_out" multiplies from the right, x @ weight
    causal: bool
    embeddings: tuple[str, ...]  # of tokens, of positions where they are learned, of segments where there are any
    norm_place: Literal["before", "after"] | Callable[[Settings], Literal["before", "after"]] | None  # norm of a block:
    # before its layer, or after the residual sum

    # ------------------------------------------------------------------------------------------- attention
    kv_heads: str | Callable[[Settings, int], int] | None = None  # key or rule; None: as many as query heads
    d_head: str | None = None  # key of a width of heads that need not be d_model / heads
    d_value: str | None = None  # key of a width of values that need not be that of queries and keys
    fused: Literal["blocks", "groups"] = "blocks"  # layout of "qkv": q, then k, then v; or by key-value group
    scale: Callable[[Settings, int, int], float] = inverse_root
    context: str | None = None  # key of the longest distance
    rope: Rope | None = None
    alibi: Callable[[Settings, int, int], tuple[float, ...] | None] | None = None  # slopes, of heads and d_head
    relative_bias: RelativeBiasKeys | None = None
    latent: Latent | None = None
    qk_norm: tuple[str, str] | None = None  # norms of each head's queries and keys
    softcap: str | None = None  # key of the soft cap of the scores
    window: Callable[[Settings, int], int | None] | None = None  # in positions, the query's own included

    # ---------------------------------------------------------------------------------------- around attention
    norm: Literal["layer", "rms", "rms + 1"] = "layer"  # "rms + 1" multiplies by 1 + weight
    norm_eps: str | None = None  # config key
    embedding_norm: str | None = None
    embedding_shared: bool = False  # several modules of a loaded model hold the table of tokens
    embedding_scale: bool = False  # embeddings are multiplied by sqrt(d_model)
    first_position: Callable[[Settings], int] | int = 0  # row of the position embeddings for the first token
    padding: str | None = None  # config key of the token that takes no position, and has its own row of positions
    attention_norm: str | Names | None = None
    attention_norm_after: str | None = None  # norm of the attention output, before the residual sum
    mlp: Mlp | Callable[[Settings], Mlp] | None = None
    experts: Experts | None = None
    parallel: bool | Callable[[Settings], bool] = False  # attention and MLP read the same stream
    decoder: Decoder | None = None  # if `is_encoder_decoder`
    final_norm: str | Callable[[Settings], str | None] | None = None
    narrow: tuple[str, str] | None = None  # maps from narrower embeddings to d_model and back, if any
    unembed: Names = ()  # alternatives for the weight (vocab, d_model); () for a model without unembedding
    logit_cap: str | None = None  # key
    masked_head: str | None = None  # parent module of a head that predicts masked tokens by the embeddings
    reads: Literal["tokens", "images"] = "tokens"

    # ------------------------------------------------------------------------------------------------ the files
    prefixes: Names = ("",)  # alternatives for the prefix of all tensor names
    in_memory: Mapping[str, str] = field(
        default_factory=dict
    )  # part of a name -> what transformers calls it once loaded
    rule_keys: tuple[str, ...] = ()  # config keys that the functions among the attributes read
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config keys, in place of those of `config_keys.KEYS`
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the config values this row supports
    refusal: str = "this variant is not known yet"  # end of the message on other values

    @property
    def config_keys(self) -> tuple[str, ...]:
        """Config keys that the row reads, apart from those of `required`."""
        keys = [self.n_layers, self.n_heads, self.d_model, self.d_head, self.d_value, self.context, self.softcap]
        keys += [self.norm_eps]
        keys += [self.logit_cap, self.kv_heads if isinstance(self.kv_heads, str) else None]
        if self.rope is not None:
            rope = self.rope
            keys += [rope.theta, rope.sliding_theta, rope.fraction, rope.n_columns, rope.unless]
            keys += ["original_max_position_embeddings"]
        if self.relative_bias is not None:
            keys += [self.relative_bias.n_bins, self.relative_bias.max_distance]
        if self.latent is not None:
            latent = self.latent
            keys += [latent.query_rank, latent.rank, latent.d_plain, latent.d_rotated, latent.d_value]
        if self.experts is not None:
            keys += [self.experts.n_experts, self.experts.n_chosen, self.experts.expert.activation]
        keys += [self.mlp.activation] if isinstance(self.mlp, Mlp) else []
        keys += ["tie_word_embeddings"] if self.unembed else []
        if self.decoder is not None:
            keys += ["is_encoder_decoder", self.decoder.scaled_logits, *self.decoder.stack.config_keys]
        return tuple(dict.fromkeys(key for key in (*keys, *self.rule_keys) if key is not None))


def by_config(fact: T | Callable[[Settings], T], settings: Settings) -> T:
    """Return an attribute of a row, evaluated on the config if it is a function."""
    return fact(settings) if callable(fact) else fact


def names(one_or_more: str | Names | None) -> Names:
    """Return alternatives as a tuple."""
    if one_or_more is None:
        return ()
    return (one_or_more,) if isinstance(one_or_more, str) else one_or_more
