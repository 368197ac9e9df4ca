"""What tnlib knows of each architecture: one row of a table, nothing anywhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Config = Mapping[str, Any]


def inverse_root(config: Config, layer: int, d_head: int) -> float:
    """Return the scale of most architectures, 1 / sqrt(d_head)."""
    return 1.0 / math.sqrt(d_head)


def _gpt2_scale(config: Config, layer: int, d_head: int) -> float:
    scale = inverse_root(config, layer, d_head) if config.get("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx", False) else scale


@dataclass(frozen=True)
class Mlp:
    """The feed-forward part of a layer: down(activation(up(x)))."""

    up: str
    down: str
    norm: str
    activation: str  # key of the config that names the function


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
    embeddings: tuple[str, ...]  # of tokens, of positions and, where there are any, of segments
    norm_place: Literal["before", "after"] | None  # of a block's LayerNorm: in front of it, or behind the sum
    norm_eps: str | None = None  # key of the config
    embedding_norm: str | None = None
    attention_norm: str | None = None
    mlp: Mlp | None = None
    final_norm: str | None = None
    unembed: tuple[str, ...] = ()  # weight (vocab, d_model); the first that is there counts; () ends in hidden states
    prefixes: tuple[str, ...] = ("",)  # in front of all names; the first under which the tensors are found counts
    required: Mapping[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # config values outside which the row is wrong
    scale: Callable[[Config, int, int], float] = inverse_root


BERT = Architecture(
    model_type="bert",
    n_layers="num_hidden_layers",
    n_heads="num_attention_heads",
    d_model="hidden_size",
    attention="encoder.layer.{layer}.attention",
    projections={"self.query": "q", "self.key": "k", "self.value": "v", "output.dense": "o"},
    stored="out_in",
    causal=False,
    embeddings=(
        "embeddings.word_embeddings",
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
    ),
    norm_place="after",
    norm_eps="layer_norm_eps",
    embedding_norm="embeddings.LayerNorm",
    attention_norm="encoder.layer.{layer}.attention.output.LayerNorm",
    mlp=Mlp(
        up="encoder.layer.{layer}.intermediate.dense",
        down="encoder.layer.{layer}.output.dense",
        norm="encoder.layer.{layer}.output.LayerNorm",
        activation="hidden_act",
    ),
    prefixes=("", "bert."),
    required={"position_embedding_type": ("absolute", None), "is_decoder": (False, None)},
)

GPT2 = Architecture(
    model_type="gpt2",
    n_layers="n_layer",
    n_heads="n_head",
    d_model="n_embd",
    attention="h.{layer}.attn",
    projections={"c_attn": "qkv", "c_proj": "o"},
    stored="in_out",
    causal=True,
    embeddings=("wte", "wpe"),
    norm_place="before",
    norm_eps="layer_norm_epsilon",
    attention_norm="h.{layer}.ln_1",
    mlp=Mlp(
        up="h.{layer}.mlp.c_fc",
        down="h.{layer}.mlp.c_proj",
        norm="h.{layer}.ln_2",
        activation="activation_function",
    ),
    final_norm="ln_f",
    unembed=("lm_head", "wte"),  # tied unless a head of its own is stored
    prefixes=("transformer.", ""),
    required={"add_cross_attention": (False, None)},
    scale=_gpt2_scale,
)

# The model that is shipped with this package; transformers has none like it.
ATTENTION_ONLY = Architecture(
    model_type="tnlib_attention_only",
    n_layers="num_hidden_layers",
    n_heads="num_attention_heads",
    d_model="hidden_size",
    attention="layers.{layer}.attention",
    projections={"query": "q", "key": "k", "value": "v", "output": "o"},
    stored="out_in",
    causal=True,
    embeddings=("embed", "positions"),
    norm_place=None,
    unembed=("unembed",),
)

ARCHITECTURES = {row.model_type: row for row in (BERT, GPT2, ATTENTION_ONLY)}
