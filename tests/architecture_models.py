"""Small models of transformers, one or more for every row of the table of architectures, with nothing 0 or 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 10}  # heads * head_dim is not d_model
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
LATENT = {**SIZES, "first_k_dense_replace": 2, "q_lora_rank": 9, "kv_lora_rank": 8}
LATENT |= {"num_key_value_heads": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
ROUTED = {**LATENT, "first_k_dense_replace": 1, "n_routed_experts": 9, "num_experts_per_tok": 4}
ROUTED |= {"moe_intermediate_size": 16, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7}
GPTJ = {
    "vocab_size": 50,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 6,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
OPT = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 40,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 24,
    "dropout": 0.0,
}
FALCON = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
FALCON |= {"bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 32}
BLOOM = {"vocab_size": 50, "hidden_size": 24, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
PHI3 = {**GROUPED, "hidden_size": 32, "original_max_position_embeddings": 16}
T5 = {"vocab_size": 50, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 7, "decoder_start_token_id": 0}
VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
VIT |= {"image_size": 12, "patch_size": 4}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **values}}


def falcon(attention: str = "eager", **values: Any) -> Any:
    """Falcon settles how it attends when it is made. Its eager attention counts ALiBi twice; "sdpa" counts it once."""
    config = tf.FalconConfig(**FALCON, **values)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def deepseek_v3_experts() -> Any:
    """DeepSeek-V3 starts with no correction of the scores by which experts are chosen."""
    model = tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**ROUTED))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.3 * torch.randn_like(buffer))
    return model


def t5_untied() -> Any:
    """T5 1.1: a gate, and an unembedding of its own; transformers ties it when it makes a model."""
    sizes = {**T5, "d_kv": 7, "relative_attention_num_buckets": 8, "num_layers": 1, "num_decoder_layers": 2}
    config = tf.T5Config(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model = tf.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    return model


YARN = {"factor": 4.0, "original_max_position_embeddings": 8}
LONGROPE = {"short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0], "partial_rotary_factor": 0.5}

MODELS: dict[str, Callable[[], Any]] = {
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**GPTJ)),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**{**SIZES, "hidden_size": 32}, **rope("default", partial_rotary_factor=0.5))
    ),
    "gpt_neox_sequential": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**{**SIZES, "hidden_size": 32}, use_parallel_residual=False, attention_bias=False)
    ),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**OPT)),
    "opt_after": lambda: tf.OPTForCausalLM(tf.OPTConfig(**OPT, do_layer_norm_before=False)),
    "opt_narrow": lambda: tf.OPTForCausalLM(tf.OPTConfig(**{**OPT, "word_embed_proj_dim": 10})),
    "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**{**SIZES, "pad_token_id": 1})),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "llama_base": lambda: tf.LlamaModel(tf.LlamaConfig(**GROUPED)),
    "llama_tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "llama_biases": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True)),
    "llama_linear": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, **rope("linear", factor=3.0))),
    "llama_dynamic": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, **rope("dynamic", factor=3.0))),
    "llama_yarn": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE, **rope("yarn", **YARN))),
    "llama_3": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(
            **WIDE,
            **rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
            ),
        )
    ),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=4)),
    "mistral_whole": lambda: tf.MistralForCausalLM(tf.MistralConfig(**WIDE, sliding_window=None)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED, num_local_experts=5, sliding_window=4)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED)),
    "qwen2_window": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**WIDE)),
    "qwen3_biases": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**WIDE, attention_bias=True)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**WIDE, **EXPERTS)),
    "qwen3_moe_normalised": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**WIDE, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[0])
    ),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**WIDE)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **WIDE,
            query_pre_attn_scalar=7,
            sliding_window=4,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        )
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            **WIDE,
            query_pre_attn_scalar=7,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
            },
        )
    ),
    "deepseek_v2": lambda: tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**LATENT)),
    "deepseek_v2_direct": lambda: tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**{**LATENT, "q_lora_rank": None})),
    "deepseek_v2_experts": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**{**ROUTED, "first_k_dense_replace": 0, "n_group": None, "topk_group": None})
    ),
    "deepseek_v2_groups": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**ROUTED, topk_method="group_limited_greedy")
    ),
    "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(**LATENT, **rope("yarn", **YARN, mscale=0.8, mscale_all_dim=0.6))
    ),
    "deepseek_v3_experts": deepseek_v3_experts,
    "deepseek_v3_halves": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENT, rope_interleave=False)),
    "phi": lambda: tf.PhiForCausalLM(
        tf.PhiConfig(**{**GROUPED, "hidden_size": 32}, **rope("default", partial_rotary_factor=0.5))
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**PHI3)),
    "phi3_window": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**PHI3, sliding_window=3)),
    "phi3_longrope": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**PHI3, **rope("longrope", **LONGROPE))),
    "starcoder2": lambda: tf.Starcoder2ForCausalLM(tf.Starcoder2Config(**GROUPED, sliding_window=4)),
    "starcoder2_untied": lambda: tf.Starcoder2ForCausalLM(
        tf.Starcoder2Config(**GROUPED, use_bias=False, tie_word_embeddings=False)
    ),
    "falcon": lambda: falcon(),
    "falcon_biases": lambda: falcon(bias=True, multi_query=False),
    "falcon_new": lambda: falcon(bias=True, num_kv_heads=2, new_decoder_architecture=True),
    "falcon_new_one_norm": lambda: falcon(num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=1),
    "falcon_alibi": lambda: falcon(attention="sdpa", alibi=True, bias=True, multi_query=False, parallel_attn=False),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(**BLOOM)),
    "bloom_six_heads": lambda: tf.BloomModel(tf.BloomConfig(**{**BLOOM, "n_head": 6})),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, num_decoder_layers=1)),
    "t5_encoder": lambda: tf.T5EncoderModel(tf.T5Config(**T5)),
    "t5_encoder_gated": lambda: tf.T5EncoderModel(
        tf.T5Config(**{**T5, "d_kv": 7, "relative_attention_num_buckets": 8}, feed_forward_proj="gated-gelu")
    ),
    "t5_untied": t5_untied,
    "vit": lambda: tf.ViTModel(tf.ViTConfig(**VIT)),
}

# Below a block, the module that reads what attention reads and the one that writes what it writes.
_PLACES = {
    "bert": ("encoder.layer", "attention.self", "attention.output.dense"),
    "roberta": ("encoder.layer", "attention.self", "attention.output.dense"),
    "gpt2": ("h", "attn", "attn.c_proj"),
    "gptj": ("h", "attn", "attn.out_proj"),
    "gpt_neox": ("layers", "attention", "attention.dense"),
    "opt": ("decoder.layers", "self_attn", "self_attn.out_proj"),
    "phi": ("layers", "self_attn", "self_attn.dense"),
    "falcon": ("h", "self_attention", "self_attention.dense"),
    "bloom": ("h", "self_attention", "self_attention.dense"),
    "t5": ("encoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o"),
    "vit": ("layers", "attention", "attention.o_proj"),
}
_LLAMA = ("layers", "self_attn", "self_attn.o_proj")


def attention_modules(base: Any) -> list[tuple[Any, Any]]:
    """Per layer, the module that reads the input of attention and the one that writes its output.

    A block of a decoder is two layers.
    """
    blocks, reader, writer = _PLACES.get(base.config.model_type, _LLAMA)
    found = [(block.get_submodule(reader), block.get_submodule(writer)) for block in base.get_submodule(blocks)]
    for block in base.decoder.block if base.config.is_encoder_decoder else ():
        attentions = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
        found += [(attention, attention.o) for attention in attentions]
    return found
