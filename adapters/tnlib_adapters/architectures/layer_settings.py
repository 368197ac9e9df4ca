"""Settings of single layers by the config: score scales, windows, ALiBi slopes, routing of experts."""

from __future__ import annotations

import math
from typing import Literal

from tnlib_adapters.architectures.architecture import Mlp, Routing, Settings, inverse_root


def gpt2_scale(settings: Settings, layer: int, d_head: int) -> float:
    """Return 1 / sqrt(d_head), or 1 if the config disables that, divided by the layer number if the config says so."""
    scale = inverse_root(settings, layer, d_head) if settings["scale_attn_weights"] else 1.0
    return scale / (layer + 1) if settings["scale_attn_by_inverse_layer_idx"] else scale


def gemma2_scale(settings: Settings, layer: int, d_head: int) -> float:
    """Return 1 / sqrt(query_pre_attn_scalar)."""
    return 1.0 / math.sqrt(settings["query_pre_attn_scalar"])


def no_scale(settings: Settings, layer: int, d_head: int) -> float:
    """Return 1: the scale is part of the weights."""
    return 1.0


def latent_scale(settings: Settings, layer: int, d_head: int) -> float:
    """Return 1 / sqrt(d_head), times the squared YaRN factor that `mscale_all_dim` states."""
    section = settings["rope_parameters"]
    weight, factor = section.get("mscale_all_dim", 0.0), section.get("factor", 1.0)
    grows = section.get("rope_type", section.get("type", "default")) != "default" and factor > 1
    return inverse_root(settings, layer, d_head) * ((0.1 * weight * math.log(factor) + 1.0) ** 2 if grows else 1.0)


def window(settings: Settings, layer: int) -> int | None:
    """Return the same window for all layers, None if the config has none."""
    stated: int | None = settings["sliding_window"]
    return stated


def window_of_some(settings: Settings, layer: int) -> int | None:
    """Return the window of the layers listed in the config, or from some layer on in older configs."""
    if not settings["use_sliding_window"]:
        return None
    kinds = settings["layer_types"]
    sliding = kinds[layer] == "sliding_attention" if kinds else layer >= settings["max_window_layers"]
    return window(settings, layer) if sliding else None


def window_of_every_other(settings: Settings, layer: int) -> int | None:
    """Return the window of the layers listed in the config, or of every other layer from the first."""
    kinds = settings["layer_types"]
    sliding = kinds[layer] == "sliding_attention" if kinds else layer % 2 == 0
    return window(settings, layer) if sliding else None


def layer_type(settings: Settings, layer: int) -> str:
    """Return "sliding_attention" or "full_attention": as listed, or five of six sliding, as in Gemma 3."""
    kinds, pattern = settings.get("layer_types"), settings.get("sliding_window_pattern")
    if kinds:
        return str(kinds[layer])
    return "sliding_attention" if pattern and (layer + 1) % pattern else "full_attention"


def window_by_layer_type(settings: Settings, layer: int) -> int | None:
    """Return the window of sliding layers."""
    return window(settings, layer) if layer_type(settings, layer) == "sliding_attention" else None


def qwen3_moe_experts(settings: Settings, layer: int) -> bool:
    """Return whether a layer has experts: every `decoder_sparse_step`-th, unless listed as dense."""
    return layer not in (settings["mlp_only_layers"] or ()) and not (layer + 1) % settings["decoder_sparse_step"]


def qwen3_moe_routing(settings: Settings) -> Routing:
    """Return the routing of Qwen3-MoE, normalised if the config says so."""
    return Routing(normalised=settings["norm_topk_prob"])


def deepseek_v2_routing(settings: Settings) -> Routing:
    """Return the routing of DeepSeek-V2: over groups ranked by their best expert if the config says so."""
    factor = settings["routed_scaling_factor"]
    if settings["topk_method"] != "group_limited_greedy":
        return Routing(normalised=False, factor=factor)
    n_groups, n_chosen = settings["n_group"], settings["topk_group"]
    return Routing(normalised=False, n_groups=n_groups, n_chosen_groups=n_chosen, factor=factor)


def deepseek_v3_routing(settings: Settings) -> Routing:
    """Return the routing of DeepSeek-V3: sigmoid scores, over groups ranked by their two best experts."""
    return Routing(
        normalised=settings["norm_topk_prob"],
        scores="sigmoid",
        n_groups=settings["n_group"],
        n_chosen_groups=settings["topk_group"],
        n_best=2,
        factor=settings["routed_scaling_factor"],
    )


def deepseek_experts(settings: Settings, layer: int) -> bool:
    """Return whether a layer of DeepSeek has experts: all but the first `first_k_dense_replace`."""
    n_dense: int = settings["first_k_dense_replace"]
    return layer >= n_dense


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Return the ALiBi slopes: a geometric sequence, completed by every other term of the next finer sequence.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)

    References
    ----------
    Press, Smith, Lewis, "Train Short, Test Long" (ICLR 2022), section 3.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8 * k / power) for k in range(1, power + 1)]
    finer = [2.0 ** (-4 * k / power) for k in range(1, 2 * power, 2)]
    return (*slopes, *finer[: n_heads - power])


def bloom_alibi(settings: Settings, n_heads: int, d_head: int) -> tuple[float, ...]:
    """Return the ALiBi slopes without further scaling."""
    return alibi_slopes(n_heads)


def falcon_alibi(settings: Settings, n_heads: int, d_head: int) -> tuple[float, ...] | None:
    """Return the ALiBi slopes if enabled; Falcon adds the bias before the score scale."""
    if not settings["alibi"]:
        return None
    return tuple(slope / math.sqrt(d_head) for slope in alibi_slopes(n_heads))


def falcon_kv_heads(settings: Settings, n_heads: int) -> int:
    """Return the number of key-value heads: as stated, one, or all, for the three generations of Falcon."""
    if settings["new_decoder_architecture"]:
        return settings["num_kv_heads"] or n_heads
    return 1 if settings["multi_query"] else n_heads


def falcon_parallel(settings: Settings) -> bool:
    """Return True if attention and feed-forward layer read the same stream."""
    return bool(settings["new_decoder_architecture"] or settings["parallel_attn"])


def neox_parallel(settings: Settings) -> bool:
    """Return True if attention and feed-forward layer read the same stream."""
    return bool(settings["use_parallel_residual"])


def roberta_first_position(settings: Settings) -> int:
    """Return the row of the position embeddings for the first token."""
    return int(settings["pad_token_id"]) + 1


def deepseek_rope_layout(settings: Settings) -> Literal["pairs", "halves"]:
    """Return which columns a rotary embedding rotates together."""
    return "pairs" if settings["rope_interleave"] else "halves"


def opt_norm_place(settings: Settings) -> Literal["before", "after"]:
    """Return where the norms of a block are."""
    return "before" if settings["do_layer_norm_before"] else "after"


def opt_final_norm(settings: Settings) -> str | None:
    """Return the name of the final norm, None for models with norms after the residual sums."""
    before = settings["do_layer_norm_before"] and not settings["_remove_final_layer_norm"]
    return "decoder.final_layer_norm" if before else None


def t5_feed_forward(settings: Settings, parent: str) -> Mlp:
    """Return the feed-forward layer of T5 below a module, with a gate if `feed_forward_proj` says so."""
    module = f"{parent}.DenseReluDense"
    function: str = settings["feed_forward_proj"]
    gated = function.startswith("gated-")
    unnamed = "gated_activation" if function == "gated-gelu" else "feed_forward_proj"
    return Mlp(
        up=f"{module}.wi_1" if gated else f"{module}.wi",
        gate=f"{module}.wi_0" if gated else None,
        down=f"{module}.wo",
        norm=f"{parent}.layer_norm",
        activation=unnamed if settings["dense_act_fn"] is None else "dense_act_fn",
    )
