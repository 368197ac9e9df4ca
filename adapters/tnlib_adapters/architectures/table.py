"""The architecture table: one row per supported model type."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from reprlib import repr as short_repr

from tnlib import FileFormatError
from tnlib_adapters.architectures.architecture import Architecture, Decoder, Mlp, RelativeBiasKeys, Rope
from tnlib_adapters.architectures.config_keys import Config, read_model_type
from tnlib_adapters.architectures.layer_settings import (
    bloom_alibi,
    falcon_alibi,
    falcon_kv_heads,
    falcon_parallel,
    gpt2_scale,
    neox_parallel,
    no_scale,
    opt_final_norm,
    opt_norm_place,
    roberta_first_position,
    t5_feed_forward,
)
from tnlib_adapters.architectures.llama_family import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    STARCODER2,
)

__all__ = ["ARCHITECTURES", "ATTENTION_ONLY", "Architecture", "Mlp", "find_row"]


BERT = Architecture(
    model_type="bert",
    attention="encoder.layer.{layer}.attention",
    projections={"self.query": "q", "self.key": "k", "self.value": "v", "output.dense": "o"},
    stored="out_in",
    causal=False,
    context="max_position_embeddings",
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
    masked_head="cls.predictions",
    prefixes=("", "bert."),
    required={"position_embedding_type": ("absolute", None), "is_decoder": (False, None)},
)

ROBERTA = replace(
    BERT,
    model_type="roberta",
    first_position=roberta_first_position,
    padding="pad_token_id",
    rule_keys=("pad_token_id",),
    masked_head="lm_head",
    prefixes=("roberta.", ""),
)

VIT = replace(
    BERT,
    model_type="vit",
    projections={"attention.query": "q", "attention.key": "k", "attention.value": "v", "output.dense": "o"},
    context=None,
    embeddings=("embeddings.patch_embeddings.projection",),
    norm_place="before",
    embedding_norm=None,
    attention_norm="encoder.layer.{layer}.layernorm_before",
    mlp=Mlp(
        up="encoder.layer.{layer}.intermediate.dense",
        down="encoder.layer.{layer}.output.dense",
        norm="encoder.layer.{layer}.layernorm_after",
        activation="hidden_act",
    ),
    final_norm="layernorm",
    masked_head=None,
    reads="images",
    prefixes=("", "vit."),
    in_memory={
        "encoder.layer.": "layers.",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    },
    required={},
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
    scale=gpt2_scale,
    rule_keys=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    context="n_positions",
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
    unembed=("lm_head", "wte"),  # tied unless lm_head is stored
    prefixes=("transformer.", ""),
    required={"add_cross_attention": (False, None)},
)

GPTJ = Architecture(
    model_type="gptj",
    n_layers="n_layer",
    n_heads="n_head",
    d_model="n_embd",
    attention="h.{layer}.attn",
    projections={"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"},
    stored="out_in",
    causal=True,
    context="n_positions",
    rope=Rope(layout="pairs", n_columns="rotary_dim"),
    embeddings=("wte",),
    norm_place="before",
    norm_eps="layer_norm_epsilon",
    attention_norm="h.{layer}.ln_1",
    mlp=Mlp(
        up="h.{layer}.mlp.fc_in",
        down="h.{layer}.mlp.fc_out",
        norm="h.{layer}.ln_1",
        activation="activation_function",
    ),
    parallel=True,
    final_norm="ln_f",
    unembed=("lm_head", "wte"),
    prefixes=("transformer.", ""),
    defaults={"rotary_dim": 64, "tie_word_embeddings": False},
)

GPT_NEOX = Architecture(
    model_type="gpt_neox",
    attention="layers.{layer}.attention",
    projections={"query_key_value": "qkv", "dense": "o"},
    fused="groups",
    stored="out_in",
    causal=True,
    context="max_position_embeddings",
    rope=Rope(theta="rotary_emb_base", fraction="rotary_pct", fraction_default=0.25),
    embeddings=("embed_in",),
    norm_place="before",
    norm_eps="layer_norm_eps",
    attention_norm="layers.{layer}.input_layernorm",
    mlp=Mlp(
        up="layers.{layer}.mlp.dense_h_to_4h",
        down="layers.{layer}.mlp.dense_4h_to_h",
        norm="layers.{layer}.post_attention_layernorm",
        activation="hidden_act",
    ),
    parallel=neox_parallel,
    rule_keys=("use_parallel_residual",),
    final_norm="final_layer_norm",
    unembed=("embed_out", "lm_head", "embed_in"),
    prefixes=("gpt_neox.", ""),
    defaults={"tie_word_embeddings": False},
)

OPT = Architecture(
    model_type="opt",
    attention="decoder.layers.{layer}.self_attn",
    projections={"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"},
    stored="out_in",
    causal=True,
    context="max_position_embeddings",
    embeddings=("decoder.embed_tokens", "decoder.embed_positions"),
    first_position=2,
    norm_place=opt_norm_place,
    rule_keys=("do_layer_norm_before", "_remove_final_layer_norm"),
    norm_eps="layer_norm_eps",
    attention_norm="decoder.layers.{layer}.self_attn_layer_norm",
    mlp=Mlp(
        up="decoder.layers.{layer}.fc1",
        down="decoder.layers.{layer}.fc2",
        norm="decoder.layers.{layer}.final_layer_norm",
        activation="activation_function",
    ),
    final_norm=opt_final_norm,
    narrow=("decoder.project_in", "decoder.project_out"),
    unembed=("lm_head", "decoder.embed_tokens"),
    prefixes=("model.", ""),
    defaults={"layer_norm_eps": 1e-5},  # not a key of its config
    required={"layer_norm_elementwise_affine": (True, None)},
)

PHI = Architecture(
    model_type="phi",
    kv_heads="num_key_value_heads",
    attention="layers.{layer}.self_attn",
    projections={"q_proj": "q", "k_proj": "k", "v_proj": "v", "dense": "o"},
    stored="out_in",
    causal=True,
    context="max_position_embeddings",
    rope=Rope(fraction_default=0.5),
    embeddings=("embed_tokens",),
    norm_place="before",
    norm_eps="layer_norm_eps",
    attention_norm="layers.{layer}.input_layernorm",
    mlp=Mlp(
        up="layers.{layer}.mlp.fc1",
        down="layers.{layer}.mlp.fc2",
        norm="layers.{layer}.input_layernorm",
        activation="hidden_act",
    ),
    parallel=True,
    final_norm="final_layernorm",
    unembed=("lm_head", "embed_tokens"),
    prefixes=("model.", ""),
    defaults={"tie_word_embeddings": False},
    required={"qk_layernorm": (False, None)},
)

FALCON = Architecture(
    model_type="falcon",
    kv_heads=falcon_kv_heads,
    attention="h.{layer}.self_attention",
    projections={"query_key_value": "qkv", "dense": "o"},
    fused="groups",
    stored="out_in",
    causal=True,
    context="max_position_embeddings",
    rope=Rope(unless="alibi"),
    alibi=falcon_alibi,
    embeddings=("word_embeddings",),
    norm_place="before",
    norm_eps="layer_norm_epsilon",
    attention_norm=("h.{layer}.ln_attn", "h.{layer}.input_layernorm"),
    mlp=Mlp(
        up="h.{layer}.mlp.dense_h_to_4h",
        down="h.{layer}.mlp.dense_4h_to_h",
        norm=("h.{layer}.ln_mlp", "h.{layer}.post_attention_layernorm", "h.{layer}.input_layernorm"),
        activation="activation",
    ),
    parallel=falcon_parallel,
    rule_keys=("new_decoder_architecture", "num_kv_heads", "multi_query", "parallel_attn"),
    final_norm="ln_f",
    unembed=("lm_head", "word_embeddings"),
    prefixes=("transformer.", ""),
    defaults={"activation": "gelu", "max_position_embeddings": 2048},
)

BLOOM = Architecture(
    model_type="bloom",
    n_layers="n_layer",
    n_heads="n_head",
    attention="h.{layer}.self_attention",
    projections={"query_key_value": "qkv", "dense": "o"},
    fused="groups",
    stored="out_in",
    causal=True,
    alibi=bloom_alibi,
    embeddings=("word_embeddings",),
    norm_place="before",
    norm_eps="layer_norm_epsilon",
    embedding_norm="word_embeddings_layernorm",
    attention_norm="h.{layer}.input_layernorm",
    mlp=Mlp(
        up="h.{layer}.mlp.dense_h_to_4h",
        down="h.{layer}.mlp.dense_4h_to_h",
        norm="h.{layer}.post_attention_layernorm",
        activation="activation",
    ),
    final_norm="ln_f",
    unembed=("lm_head", "word_embeddings"),
    prefixes=("transformer.", ""),
    defaults={"activation": "gelu_bloom"},  # not a key of its config
    required={"apply_residual_connection_post_layernorm": (False, None)},
)

_T5_BIAS = RelativeBiasKeys(
    table="encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    n_bins="relative_attention_num_buckets",
    max_distance="relative_attention_max_distance",
)

# A T5EncoderModel; with a decoder below.
_T5_ENCODER = Architecture(
    model_type="t5",
    n_layers="num_layers",
    n_heads="num_heads",
    d_model="d_model",
    d_head="d_kv",
    attention="encoder.block.{layer}.layer.0.SelfAttention",
    projections={"q": "q", "k": "k", "v": "v", "o": "o"},
    stored="out_in",
    causal=False,
    scale=no_scale,
    relative_bias=_T5_BIAS,
    embeddings=("shared",),
    embedding_shared=True,
    norm_place="before",
    norm="rms",
    norm_eps="layer_norm_epsilon",
    attention_norm="encoder.block.{layer}.layer.0.layer_norm",
    mlp=partial(t5_feed_forward, parent="encoder.block.{layer}.layer.1"),
    rule_keys=("feed_forward_proj", "gated_activation", "dense_act_fn"),
    final_norm="encoder.final_layer_norm",
    defaults={
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "relu",
        "gated_activation": "gelu_new",  # not a key of its config
        "layer_norm_epsilon": 1e-6,
    },
    required={"is_decoder": (False, None)},
)

T5 = replace(
    _T5_ENCODER,
    decoder=Decoder(
        stack=replace(
            _T5_ENCODER,
            n_layers="num_decoder_layers",
            attention="decoder.block.{layer}.layer.0.SelfAttention",
            causal=True,
            relative_bias=replace(_T5_BIAS, table="decoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
            attention_norm="decoder.block.{layer}.layer.0.layer_norm",
            mlp=partial(t5_feed_forward, parent="decoder.block.{layer}.layer.2"),
            final_norm="decoder.final_layer_norm",
            unembed=("lm_head", "shared"),
        ),
        cross_attention="decoder.block.{layer}.layer.1.EncDecAttention",
        cross_norm="decoder.block.{layer}.layer.1.layer_norm",
        scaled_logits="scale_decoder_outputs",
    ),
)

# The built-in model; transformers has no such architecture.
ATTENTION_ONLY = Architecture(
    model_type="tnlib_attention_only",
    attention="layers.{layer}.attention",
    projections={"query": "q", "key": "k", "value": "v", "output": "o"},
    stored="out_in",
    causal=True,
    context="max_position_embeddings",
    embeddings=("embed", "positions"),
    norm_place=None,
    unembed=("unembed",),
)

_ROWS = (
    *(BERT, ROBERTA, VIT, GPT2, GPTJ, GPT_NEOX, OPT, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE),
    *(GEMMA, GEMMA2, GEMMA3, PHI, PHI3, FALCON, BLOOM, DEEPSEEK_V2, DEEPSEEK_V3, STARCODER2, T5, ATTENTION_ONLY),
)
ARCHITECTURES = {row.model_type: row for row in _ROWS}


def find_row(config: Config, where: str, function: str) -> Architecture:
    """Return the row for a config, or raise `FileFormatError` if there is none."""
    model_type = read_model_type(config)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise FileFormatError(
            f"{function}: model_type in {where} must be one of {', '.join(sorted(ARCHITECTURES))}, "
            f"got {short_repr(model_type)}; other architectures are not known yet."
        )
    return ARCHITECTURES[model_type]
