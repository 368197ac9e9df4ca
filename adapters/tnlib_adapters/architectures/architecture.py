"""What one row of the table of architectures can say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Config = Mapping[str, Any]
T = TypeVar("T")
Names = tuple[str, ...]  # of modules, of which the first that is there counts

# Keys that configs of different ages use for the same number.
SYNONYMS = (
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_embd", "hidden_size", "n_embed"),
    ("n_positions", "max_position_embeddings"),
    ("num_kv_heads", "num_key_value_heads"),
)


def inverse_root(config: Config, layer: int, d_head: int) -> float:
    """Return the scale of most architectures, 1 / sqrt(d_head)."""
    return 1.0 / math.sqrt(d_head)


@dataclass(frozen=True)
class Mlp:
    """The feed-forward part of a layer: down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    up: str
    down: str
    norm: str | Names
    activation: str  # key of the config that names the function
    gate: str | None = None  # the same module as `up` where one matrix holds both, the gate first
    norm_after: str | None = None  # of what is added to the stream, before it is added


@dataclass(frozen=True)
class Rope:
    """Where a config keeps its rotary embeddings, besides `rope_parameters` or `rope_scaling`.

    Frequency f turns columns f and F + f of a head of which 2F columns rotate, or columns 2f and 2f + 1 where the
    layout is "pairs".
    """

    layout: Literal["halves", "pairs"] = "halves"
    theta: str = "rope_theta"  # keys of the config
    sliding_theta: str | None = None  # of layers with a window, where configs that do not list layers apart have it
    fraction: str = "partial_rotary_factor"
    n_columns: str | None = None  # where the config counts the rotating columns instead
    fraction_default: float = 1.0
    unless: str | None = None  # a key that switches the rotation off


@dataclass(frozen=True)
class Architecture:
    """How one family of checkpoints names, stores and wires its tensors.

    Tensor names are patterns in which {layer} is the number of the layer. A module has tensors `<name>.weight`
    and, perhaps, `<name>.bias`.
    """

    model_type: str
    n_layers: str  # keys of the config
    n_heads: str
    d_model: str
    attention: str  # the module that all attention tensors of a layer stand below
    projections: Mapping[str, str]  # module below `attention` -> the projections it holds, in order: "q", "qkv", ...
    stored: Literal["out_in", "in_out"]  # legs of every weight; "in_out" multiplies from the right, x @ weight
    causal: bool
    embeddings: tuple[str, ...]  # of tokens, of positions where they are learned, of segments where there are any
    norm_place: Literal["before", "after"] | Callable[[Config], Literal["before", "after"]] | None  # of a block's norm:
    # in front of it, or behind the sum

    # ------------------------------------------------------------------------------------------- attention
    kv_heads: str | Callable[[Config, int], int] | None = None  # key or rule; None: as many as query heads
    d_head: str | None = None  # key of a width of heads that need not be d_model / heads
    fused: Literal["blocks", "groups"] = "blocks"  # of "qkv": all of q, then k, then v; or group by group
    scale: Callable[[Config, int, int], float] = inverse_root
    context: str | None = None  # key of the longest distance
    rope: Rope | None = None
    alibi: Callable[[Config, int, int], tuple[float, ...] | None] | None = None  # slopes, of heads and d_head
    qk_norm: tuple[str, str] | None = None  # norms of each head's queries and keys
    softcap: str | None = None  # key: scores are brought into (-cap, cap)
    window: Callable[[Config, int], int | None] | None = None  # how many positions back a layer sees, its own included

    # ---------------------------------------------------------------------------------------- around attention
    norm: Literal["layer", "rms", "rms + 1"] = "layer"  # "rms + 1" multiplies by 1 + weight
    norm_eps: str | None = None  # key of the config
    embedding_norm: str | None = None
    embedding_scale: bool = False  # embeddings are multiplied by sqrt(d_model)
    first_position: Callable[[Config], int] | int = 0  # row of the position embeddings that the first token gets
    attention_norm: str | Names | None = None
    attention_norm_after: str | None = None  # of what attention adds to the stream, before it is added
    mlp: Mlp | None = None
    parallel: bool | Callable[[Config], bool] = False  # attention and MLP read the same stream
    final_norm: str | Callable[[Config], str | None] | None = None
    narrow: tuple[str, str] | None = None  # maps from narrower embeddings into the stream and back, where there are any
    unembed: Names = ()  # weight (vocab, d_model); the first that is there counts; () ends in hidden states
    logit_cap: str | None = None  # key
    reads: Literal["tokens", "images"] = "tokens"

    # ------------------------------------------------------------------------------------------------ the files
    prefixes: Names = ("",)  # in front of all names; the first under which the tensors are found counts
    in_memory: Mapping[str, str] = field(
        default_factory=dict
    )  # part of a name -> what transformers calls it once loaded
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that a config may leave out
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values outside which the row is wrong

    def get(self, config: Config, key: str) -> Any:
        """Return a value of a config, by this name or an older one, or the default where the config is silent."""
        known = next((group for group in SYNONYMS if key in group), ())
        for name in (key, *known):
            if config.get(name) is not None:
                return config[name]
        return self.defaults.get(key)

    def stated(self, config: Config, key: str) -> Any:
        """Return a value of a config where null is an answer, and the default only where the key is missing."""
        return config[key] if key in config else self.defaults.get(key)


def by_config(fact: T | Callable[[Config], T], config: Config) -> T:
    """Return a fact of a row, which may depend on the config."""
    return fact(config) if callable(fact) else fact


def names(one_or_more: str | Names | None) -> Names:
    """Return alternatives as a tuple."""
    if one_or_more is None:
        return ()
    return (one_or_more,) if isinstance(one_or_more, str) else one_or_more
