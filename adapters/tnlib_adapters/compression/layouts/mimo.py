"""MiMo-V2-Flash as the container of values that are narrower than queries and keys.

The architecture has widths of its own for both, and dense layers of Llama's kind if config.json says so in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import AttentionWiring, LayerWiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.layouts.layout_request import LayoutRequest, check_at_most
from tnlib_adapters.compression.layouts.narrowed_layers import NarrowedLayers, Widths, widths_of
from tnlib_adapters.compression.layouts.smaller_model import (
    HEADS_OF_OTHER_KINDS,
    Reasons,
    first_reason,
    has_default_scale,
    refuse,
    rope_of,
    sees_all,
)
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.files.tensor_file import TensorInfo

# keys of config.json that are kept as they are
_KEPT = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("initializer_range", "use_cache", "attention_dropout", "transformers_version"),
)


class MimoModel:
    """A model with values of width `v_head_dim`, written as a MiMoV2FlashForCausalLM; see `SmallerModel`."""

    what = "values"

    def __init__(self, checkpoint: Checkpoint, request: LayoutRequest) -> None:
        if reason := _reason_to_refuse(checkpoint):
            refuse("mimo", checkpoint, reason)
        self._checkpoint, before = checkpoint, widths_of(checkpoint)
        if request.keep is None:
            width = check_at_most("v_head_dim", request.sizes["v_head_dim"], before.value)
        else:  # all compressed tensors are proportional to it
            width = math.floor(request.keep * before.value + 1e-9)
            check_at_most("v_head_dim", width, before.value)
        self.widths = Widths(before.head, width, before.neurons)

    def config(self, layers: NarrowedLayers) -> dict[str, Any]:
        """Return the content of config.json, with the names of transformers and those of vLLM, SGLang and llama.cpp."""
        checkpoint, attention = self._checkpoint, self._checkpoint.wiring.layers[0].attention
        sizes, n_layers, original = checkpoint.sizes, checkpoint.sizes.n_layers, dict(checkpoint.config)
        rope, turning = rope_of(attention), attention.frequencies(None, "compress")
        base, fraction = (rope or (1e4, 1.0))[0], 2 * len(turning.radians) / sizes.d_head if turning else 1.0
        eps = checkpoint.wiring.layers[0].attention.norm
        shared = {
            "vocab_size": checkpoint.folder.tensors[checkpoint.wiring.embedding.table.weight].shape[0],
            "hidden_size": sizes.d_model,
            "intermediate_size": self.widths.neurons,
            "num_hidden_layers": n_layers,
            "num_attention_heads": sizes.n_heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.d_head,
            "v_head_dim": self.widths.value,
            "hidden_act": "silu",
            "max_position_embeddings": attention.context,
            "rms_norm_eps": eps and eps.required_eps("compress"),
            "attention_bias": _has_biases(checkpoint, attention),
            "attention_value_scale": None,
            "tie_word_embeddings": False,
            # no layer has a window; vLLM may apply a stated one to all layers if their types are equal
            "sliding_window": attention.context,
            "layer_types": ["full_attention"] * n_layers,
            "mlp_layer_types": ["dense"] * n_layers,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": fraction}
            },
        }
        return {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            **{key: value for key, value in original.items() if key in _KEPT},
            **shared,
            **_keys_of_engines(shared, base, fraction),
        }

    def copied(self) -> Mapping[str, TensorInfo]:
        """Return embeddings, unembedding and norms by their new names; a tied unembedding is stored twice."""
        wiring, tensors = self._checkpoint.wiring, self._checkpoint.folder.tensors
        names = {"model.embed_tokens.weight": wiring.embedding.table.weight}
        for k, layer in enumerate(wiring.layers):
            norms = {"input_layernorm": layer.attention.norm, "post_attention_layernorm": _norm(layer)}
            names |= {f"model.layers.{k}.{new}.weight": norm.weight for new, norm in norms.items() if norm}
        names |= {"model.norm.weight": wiring.final_norm.weight} if wiring.final_norm else {}
        names |= {"lm_head.weight": wiring.unembedding.linear.weight} if wiring.unembedding else {}
        return {new: tensors[old] for new, old in names.items()}

    def tensors(self, k: int, layers: NarrowedLayers, products: Products) -> dict[str, Array]:
        """Return the projections and the feed-forward matrices of layer k."""
        projections, prefix = layers.narrow_projections(products), f"model.layers.{k}"
        biases = dict(projections.biases)
        if biases:
            biases = {name: biases.get(name, np.zeros(projections.weights[name].shape[1])) for name in "qkv"}
        tensors = {f"{prefix}.self_attn.{name}_proj.weight": w.T for name, w in projections.weights.items()}
        tensors |= {f"{prefix}.self_attn.{name}_proj.bias": bias for name, bias in biases.items()}
        feed_forward = self._checkpoint.wiring.layers[k].feed_forward
        matrices, _ = layers.narrow_feed_forward(k, products)
        if feed_forward is not None and feed_forward.gate is not None:
            gate, up = matrices[feed_forward.gate.name], matrices[feed_forward.up.name]
            if feed_forward.gate == feed_forward.up:  # the gate first
                gate, up = np.split(up, 2, axis=1)
            named = {"gate": gate, "up": up, "down": matrices[feed_forward.down.name]}
            tensors |= {f"{prefix}.mlp.{name}_proj.weight": matrix.T for name, matrix in named.items()}
        return {name: np.ascontiguousarray(values) for name, values in tensors.items()}


def _keys_of_engines(shared: Mapping[str, Any], base: float, fraction: float) -> dict[str, Any]:
    """Return the keys that vLLM, SGLang and the converter of llama.cpp read: no layer has a window or experts."""
    none = [0] * shared["num_hidden_layers"]
    return {
        "hybrid_layer_pattern": none,
        "moe_layer_freq": none,
        "layernorm_epsilon": shared["rms_norm_eps"],
        "rope_theta": base,
        "partial_rotary_factor": fraction,
        "swa_num_attention_heads": shared["num_attention_heads"],
        "swa_num_key_value_heads": shared["num_key_value_heads"],
        "swa_head_dim": shared["head_dim"],
        "swa_v_head_dim": shared["v_head_dim"],
        "swa_rope_theta": base,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": False,
        # of experts, which no layer has: more than there are groups, as the loader of llama.cpp expects
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": shared["intermediate_size"],
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


# ------------------------------------------------------------------------------------------------------- refusals

_ATTENTION: Reasons = {
    **HEADS_OF_OTHER_KINDS,
    "engines do not scale its rotary embeddings": lambda a: (rope_of(a) or (1.0, 1.0))[1] != 1,
    "a sliding window shortens its attention": lambda a: not sees_all(a),
    "its scores are capped": lambda a: a.softcap is not None,
    "its scores have a bias": lambda a: a.alibi is not None or a.relative_bias is not None,
    "its scores are not divided by the root of the width of a head": lambda a: not has_default_scale(a),
    "it is no causal language model of one stack": lambda a: not a.causal or a.cross,
}


def _reason_to_refuse(checkpoint: Checkpoint) -> str | None:
    """Return why MiMo-V2-Flash cannot hold a model, or None."""
    wiring = checkpoint.wiring
    unembedding, embedding = wiring.unembedding, wiring.embedding
    if unembedding is None or wiring.reads != "tokens" or wiring.encoder is not None:
        return "it is no causal language model of one stack"
    if reason := first_reason(wiring.layers, _ATTENTION):
        return reason
    if any(value is not None for value in (embedding.positions, embedding.segments, embedding.widen, embedding.norm)):
        return "its embedding is more than a table"
    if embedding.scale != 1 or unembedding.scale != 1 or unembedding.logit_cap is not None:
        return "its embeddings or logits are scaled"
    reasons = (_reason_of_biases(checkpoint), *map(_reason_of_layer, wiring.layers), _reason_of_norms(checkpoint))
    return next((reason for reason in reasons if reason), None)


def _reason_of_layer(layer: LayerWiring) -> str | None:
    feed_forward = layer.feed_forward
    if layer.experts is not None or feed_forward is None:
        return "its layers have experts" if layer.experts else "its layers have no feed-forward layer"
    if layer.parallel:
        return "its attention and its feed-forward layer read the same stream"
    if feed_forward.gate is None or feed_forward.activation not in ("silu", "swish"):
        return "its feed-forward layers have no gate with SiLU"
    return None


def _reason_of_biases(checkpoint: Checkpoint) -> str | None:
    tensors, layers = checkpoint.folder.tensors, checkpoint.wiring.layers
    outputs = [layer.attention.projections["o"].bias for layer in layers if "o" in layer.attention.projections]
    matrices = [matrix.bias for layer in layers for matrix in layer.feed_forward_matrices]
    if any(name in tensors for name in outputs):
        return "its attention has an output bias"
    return "its feed-forward layers have biases" if any(name in tensors for name in matrices) else None


def _reason_of_norms(checkpoint: Checkpoint) -> str | None:
    layers, final = checkpoint.wiring.layers, checkpoint.wiring.final_norm
    norms = [norm for layer in layers for norm in (layer.attention.norm, _norm(layer))]
    after = [norm for layer in layers for norm in (layer.attention.output_norm, _output_norm(layer))]
    if any(norm is None or norm.place != "pre" for norm in norms) or any(after) or final is None:
        return "its norms are not before its sublayers"
    if any(norm.kind != "rms" or norm.offset for norm in (*norms, final) if norm):
        return "its norms are no plain RMSNorm"
    return None


def _norm(layer: LayerWiring) -> Any:
    return layer.second and layer.second.norm


def _output_norm(layer: LayerWiring) -> Any:
    return layer.second and layer.second.output_norm


def _has_biases(checkpoint: Checkpoint, attention: AttentionWiring) -> bool:
    tensors = checkpoint.folder.tensors
    return any(linear.bias in tensors for held, linear in attention.projections.items() if held != "o")
