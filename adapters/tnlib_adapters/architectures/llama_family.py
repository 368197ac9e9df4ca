"""Rows of Llama and of the families derived from it: Mistral, StarCoder2, Qwen, Gemma, Phi-3, DeepSeek."""

from __future__ import annotations

from dataclasses import replace

from tnlib_adapters.architectures.architecture import Architecture, Experts, Latent, Mlp, Rope
from tnlib_adapters.architectures.layer_settings import (
    deepseek_experts,
    deepseek_rope_layout,
    deepseek_v2_routing,
    deepseek_v3_routing,
    gemma2_scale,
    latent_scale,
    qwen3_moe_experts,
    qwen3_moe_routing,
    window,
    window_by_layer_type,
    window_of_every_other,
    window_of_some,
)

_SECOND_NORM = "layers.{layer}.post_attention_layernorm"


def _gated(module: str, norm: str = _SECOND_NORM, norm_after: str | None = None, activation: str = "hidden_act") -> Mlp:
    """Return a feed-forward layer of three matrices below a module, under the names of Llama."""
    return Mlp(
        up=f"{module}.up_proj",
        down=f"{module}.down_proj",
        gate=f"{module}.gate_proj",
        norm=norm,
        norm_after=norm_after,
        activation=activation,
    )


LLAMA = Architecture(
    model_type="llama",
    kv_heads="num_key_value_heads",
    d_head="head_dim",
    attention="layers.{layer}.self_attn",
    projections={"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"},
    stored="out_in",
    causal=True,
    context="max_position_embeddings",
    rope=Rope(),
    embeddings=("embed_tokens",),
    norm_place="before",
    norm="rms",
    norm_eps="rms_norm_eps",
    attention_norm="layers.{layer}.input_layernorm",
    mlp=_gated("layers.{layer}.mlp"),
    final_norm="norm",
    unembed=("lm_head", "embed_tokens"),
    prefixes=("model.", ""),
    defaults={"hidden_act": "silu", "tie_word_embeddings": False},
)

MISTRAL = replace(LLAMA, model_type="mistral", window=window, rule_keys=("sliding_window",))

MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    mlp=None,
    experts=Experts(
        router="layers.{layer}.block_sparse_moe.gate",
        expert=Mlp(
            up="layers.{layer}.block_sparse_moe.experts.{expert}.w3",
            down="layers.{layer}.block_sparse_moe.experts.{expert}.w2",
            gate="layers.{layer}.block_sparse_moe.experts.{expert}.w1",
            norm=_SECOND_NORM,
            activation="hidden_act",
        ),
        n_experts="num_local_experts",
        n_chosen="num_experts_per_tok",
    ),
    defaults={
        **LLAMA.defaults,
        "sliding_window": None,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)

STARCODER2 = replace(
    MISTRAL,
    model_type="starcoder2",
    norm="layer",
    norm_eps="norm_epsilon",
    mlp=Mlp(
        up="layers.{layer}.mlp.c_fc",
        down="layers.{layer}.mlp.c_proj",
        norm=_SECOND_NORM,
        activation="hidden_act",
    ),
    defaults={"sliding_window": None, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
)

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    window=window_of_some,
    rule_keys=("use_sliding_window", "sliding_window", "layer_types", "max_window_layers"),
)

QWEN3 = replace(QWEN2, model_type="qwen3", qk_norm=("q_norm", "k_norm"), defaults={**LLAMA.defaults, "head_dim": 128})

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    d_head="head_dim",
    experts=Experts(
        router="layers.{layer}.mlp.gate",
        expert=_gated("layers.{layer}.mlp.experts.{expert}"),
        n_experts="num_experts",
        n_chosen="num_experts_per_tok",
        routing=qwen3_moe_routing,
        in_layer=qwen3_moe_experts,
    ),
    rule_keys=(*QWEN3.rule_keys, "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),
    defaults={**LLAMA.defaults, "num_experts": 128, "num_experts_per_tok": 8},
)

GEMMA = replace(
    LLAMA,
    model_type="gemma",
    norm="rms + 1",
    embedding_scale=True,
    defaults={"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    required={"use_bidirectional_attention": (False, None)},
)

GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    scale=gemma2_scale,
    softcap="attn_logit_softcapping",
    window=window_of_every_other,
    rule_keys=("query_pre_attn_scalar", "sliding_window", "layer_types"),
    attention_norm_after="layers.{layer}.post_attention_layernorm",
    mlp=_gated(
        "layers.{layer}.mlp",
        norm="layers.{layer}.pre_feedforward_layernorm",
        norm_after="layers.{layer}.post_feedforward_layernorm",
        activation="hidden_activation",
    ),
    logit_cap="final_logit_softcapping",
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    rope=Rope(sliding_theta="rope_local_base_freq"),
    qk_norm=("q_norm", "k_norm"),
    window=window_by_layer_type,
    rule_keys=(*GEMMA2.rule_keys, "sliding_window_pattern"),
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)

PHI3 = replace(
    LLAMA,
    model_type="phi3",
    d_head=None,
    projections={"qkv_proj": "qkv", "o_proj": "o"},
    window=window,
    rule_keys=("sliding_window",),
    mlp=Mlp(
        up="layers.{layer}.mlp.gate_up_proj",
        gate="layers.{layer}.mlp.gate_up_proj",
        down="layers.{layer}.mlp.down_proj",
        norm=_SECOND_NORM,
        activation="hidden_act",
    ),
    defaults={**LLAMA.defaults, "sliding_window": None},
)

_ROUTING_KEYS = ("n_group", "topk_group", "routed_scaling_factor")
_DEEPSEEK_V3_EXPERTS = Experts(
    router="layers.{layer}.mlp.gate",
    expert=_gated("layers.{layer}.mlp.experts.{expert}"),
    n_experts="n_routed_experts",
    n_chosen="num_experts_per_tok",
    routing=deepseek_v3_routing,
    correction="layers.{layer}.mlp.gate.e_score_correction_bias",
    shared=_gated("layers.{layer}.mlp.shared_experts"),
    in_layer=deepseek_experts,
)

DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    d_head=None,
    kv_heads=None,
    projections={"o_proj": "o"},
    latent=Latent(
        query="q_proj",
        query_down="q_a_proj",
        query_norm="q_a_layernorm",
        query_up="q_b_proj",
        down="kv_a_proj_with_mqa",
        norm="kv_a_layernorm",
        up="kv_b_proj",
        query_rank="q_lora_rank",
        rank="kv_lora_rank",
        d_plain="qk_nope_head_dim",
        d_rotated="qk_rope_head_dim",
        d_value="v_head_dim",
    ),
    scale=latent_scale,
    rope=Rope(layout=deepseek_rope_layout, n_columns="qk_rope_head_dim"),
    experts=_DEEPSEEK_V3_EXPERTS,
    rule_keys=("rope_interleave", "first_k_dense_replace", *_ROUTING_KEYS, "norm_topk_prob"),
    defaults={
        **LLAMA.defaults,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    required={
        "attention_bias": (False, None),
        "moe_layer_freq": (1, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    rope=Rope(layout="pairs", n_columns="qk_rope_head_dim"),
    experts=replace(_DEEPSEEK_V3_EXPERTS, routing=deepseek_v2_routing, correction=None),
    rule_keys=("first_k_dense_replace", *_ROUTING_KEYS, "topk_method"),
    defaults={**LLAMA.defaults, "n_routed_experts": 64},
    required={
        "attention_bias": (False, None),
        "moe_layer_freq": (1, None),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy", None),
    },
)
