"""Row type of the architecture table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Config = Mapping[str, Any]
T = TypeVar("T")
Names = tuple[str, ...]  # alternative module names; the first that exists is used

# Config keys of different transformers versions for the same number.
SYNONYMS = (
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_embd", "hidden_size", "n_embed"),
    ("n_positions", "max_position_embeddings"),
    ("num_kv_heads", "num_key_value_heads"),
    ("num_local_experts", "num_experts"),
)


def inverse_root(config: Config, layer: int, d_head: int) -> float:
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


def all_layers(config: Config, layer: int) -> bool:
    """Return True, whatever the layer."""
    return True


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: feed-forward layers of which a router chooses and weights a few at every position."""

    router: str
    expert: Mlp  # patterns with {layer} and {expert}
    n_experts: str  # config keys
    n_chosen: str
    normalised: bool | Callable[[Config], bool] = True  # weights of the chosen experts sum to one
    in_layer: Callable[[Config, int], bool] = all_layers  # other layers have the feed-forward layer of the row


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

    layout: Literal["halves", "pairs"] | Callable[[Config], Literal["halves", "pairs"]] = "halves"
    theta: str = "rope_theta"  # config keys
    sliding_theta: str | None = None  # of layers with a window, where configs that do not list layers apart have it
    fraction: str = "partial_rotary_factor"
    n_columns: str | None = None  # key of the number of rotated columns, in place of a fraction
    fraction_default: float = 1.0
    unless: str | None = None  # key that disables the rotation


@dataclass(frozen=True)
class RelativeBias:
    """Bias of the scores by binned distance: a table (bins, heads) that all layers share."""

    table: str
    n_bins: str  # config keys
    max_distance: str


@dataclass(frozen=True)
class Architecture:
    """Tensor names, storage layout and structure of one family of checkpoints.

    Tensor names are patterns with {layer} for the layer number. A module has tensors `<name>.weight` and, optionally,
    `<name>.bias`.
    """

    model_type: str
    n_layers: str  # config keys
    n_heads: str
    d_model: str
    attention: str  # parent module of the attention tensors of a layer
    projections: Mapping[str, str]  # module below `attention` -> the projections it holds, in order: "q", "qkv", ...
    stored: Literal["out_in", "in_out"]  # legs of every weight; "in_out" multiplies from the right, x @ weight
    causal: bool
    embeddings: tuple[str, ...]  # of tokens, of positions where they are learned, of segments where there are any
    norm_place: Literal["before", "after"] | Callable[[Config], Literal["before", "after"]] | None  # norm of a block:
    # before its layer, or after the residual sum

    # ------------------------------------------------------------------------------------------- attention
    kv_heads: str | Callable[[Config, int], int] | None = None  # key or rule; None: as many as query heads
    d_head: str | None = None  # key of a width of heads that need not be d_model / heads
    fused: Literal["blocks", "groups"] = "blocks"  # layout of "qkv": q, then k, then v; or by key-value group
    scale: Callable[[Config, int, int], float] = inverse_root
    context: str | None = None  # key of the longest distance
    rope: Rope | None = None
    alibi: Callable[[Config, int, int], tuple[float, ...] | None] | None = None  # slopes, of heads and d_head
    relative_bias: RelativeBias | None = None
    latent: Latent | None = None
    qk_norm: tuple[str, str] | None = None  # norms of each head's queries and keys
    softcap: str | None = None  # key of the soft cap of the scores
    window: Callable[[Config, int], int | None] | None = None  # attention window in positions, the query's own included

    # ---------------------------------------------------------------------------------------- around attention
    norm: Literal["layer", "rms", "rms + 1"] = "layer"  # "rms + 1" multiplies by 1 + weight
    norm_eps: str | None = None  # config key
    embedding_norm: str | None = None
    embedding_shared: bool = False  # several modules of a loaded model hold the table of tokens
    embedding_scale: bool = False  # embeddings are multiplied by sqrt(d_model)
    first_position: Callable[[Config], int] | int = 0  # row of the position embeddings for the first token
    attention_norm: str | Names | None = None
    attention_norm_after: str | None = None  # norm of the attention output, before the residual sum
    mlp: Mlp | Callable[[Config], Mlp] | None = None
    experts: Experts | None = None
    dense_layers: str | None = None  # key of a number of layers, behind which there are unsupported experts
    parallel: bool | Callable[[Config], bool] = False  # attention and MLP read the same stream
    final_norm: str | Callable[[Config], str | None] | None = None
    narrow: tuple[str, str] | None = None  # maps from narrower embeddings to d_model and back, if any
    unembed: Names = ()  # alternatives for the weight (vocab, d_model); () for a model without unembedding
    logit_cap: str | None = None  # key
    reads: Literal["tokens", "images"] = "tokens"

    # ------------------------------------------------------------------------------------------------ the files
    prefixes: Names = ("",)  # alternatives for the prefix of all tensor names
    in_memory: Mapping[str, str] = field(
        default_factory=dict
    )  # part of a name -> what transformers calls it once loaded
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that a config may leave out
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the config values this row supports
    refusal: str = "this variant is not known yet"  # end of the message on other values

    def get(self, config: Config, key: str) -> Any:
        """Return a config value by this key or a synonym, or the default if the key is missing or null."""
        synonyms = next((group for group in SYNONYMS if key in group), ())
        for name in (key, *synonyms):
            if config.get(name) is not None:
                return config[name]
        return self.defaults.get(key)

    def stated(self, config: Config, key: str) -> Any:
        """Return a config value; null counts as a value, and the default applies only if the key is missing."""
        return config[key] if key in config else self.defaults.get(key)


def by_config(fact: T | Callable[[Config], T], config: Config) -> T:
    """Return an attribute of a row, evaluated on the config if it is a function."""
    return fact(config) if callable(fact) else fact


def names(one_or_more: str | Names | None) -> Names:
    """Return alternatives as a tuple."""
    if one_or_more is None:
        return ()
    return (one_or_more,) if isinstance(one_or_more, str) else one_or_more
