"""DeepSeek-V3 as the container of multi-head latent attention: one latent vector for the keys and values of all heads.

The architecture has dense layers of Llama's kind if config.json says so. The norm of the latent vector is made linear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import LayerWiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.layouts.latent_layers import LatentLayers
from tnlib_adapters.compression.layouts.latent_norm import EPS, linear_norm
from tnlib_adapters.compression.layouts.layout_request import LayoutRequest, check_at_most
from tnlib_adapters.compression.layouts.narrowed_layers import widths_of
from tnlib_adapters.compression.layouts.smaller_model import (
    HEADS_OF_OTHER_KINDS,
    Reasons,
    first_reason,
    has_default_scale,
    refuse,
    rope_of,
    sees_all,
)
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.files.tensor_file import TensorInfo

# keys of config.json that are kept as they are
_KEPT = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("initializer_range", "use_cache", "attention_dropout", "transformers_version"),
)

_RANK, _ROTATED = "kv_lora_rank", "qk_rope_head_dim"


class MlaModel:
    """A model with a latent vector of `kv_lora_rank` columns and a rotated key of `qk_rope_head_dim`.

    It is written as a DeepseekV3ForCausalLM; see `SmallerModel`.
    """

    what = "attention"

    def __init__(self, checkpoint: Checkpoint, request: LayoutRequest) -> None:
        if reason := _reason_to_refuse(checkpoint) or _reason_of_latent(checkpoint):
            refuse("mla", checkpoint, reason)
        self._checkpoint, sizes = checkpoint, checkpoint.sizes
        missing = [key for key in (_RANK, _ROTATED) if key not in request.sizes]
        if missing:
            raise ArgumentError(
                f"compress: sizes of layout 'mla' must state {_RANK} and {_ROTATED}, got no {missing[0]}; pass both."
            )
        self._rank = check_at_most(_RANK, request.sizes[_RANK], sizes.widths["k"] + sizes.widths["v"])
        turning = checkpoint.wiring.layers[0].attention.frequencies(None, "compress")
        most = 2 * len(turning.radians) if turning else 0
        self._rotated = check_at_most(_ROTATED, request.sizes[_ROTATED], most)
        if self._rotated % 2:
            refuse("mla", checkpoint, f"{_ROTATED} must be even, got {self._rotated}", "pass an even number")

    def layers(self, workspace: Workspace) -> LatentLayers:
        """Return the layers, to be chosen and fitted."""
        return LatentLayers(self._checkpoint, self._rank, self._rotated, workspace)

    def config(self, layers: LatentLayers) -> dict[str, Any]:
        """Return the content of config.json, with the names of transformers and those of vLLM, SGLang and llama.cpp."""
        sizes, neurons = self._checkpoint.sizes, widths_of(self._checkpoint).neurons
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **_decoder_config(self._checkpoint, neurons),
            "rms_norm_eps": EPS,
            "num_key_value_heads": sizes.n_heads,
            "attention_bias": False,
            "q_lora_rank": None,
            _RANK: self._rank,
            "qk_nope_head_dim": sizes.d_head,
            _ROTATED: self._rotated,
            "v_head_dim": sizes.d_value,
            "rope_interleave": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": layers.base},
            "rope_theta": layers.base,
            **_no_experts(neurons),
            "first_k_dense_replace": sizes.n_layers,
            "moe_layer_freq": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
        }

    def copied(self) -> Mapping[str, TensorInfo]:
        """Return embeddings, unembedding and norms by their new names; a tied unembedding is stored twice."""
        return _decoder_tensors(self._checkpoint)

    def scaled(self) -> Mapping[str, float]:
        """Return the factor of the embeddings if eps of the norms is another."""
        return {} if self._stream_scale == 1 else {"model.embed_tokens.weight": self._stream_scale}

    @property
    def _stream_scale(self) -> float:
        """Factor of the residual stream, which its norms remove: a x / sqrt(a^2 |x|^2 + eps) for a^2 = eps / old."""
        return math.sqrt(EPS / (_norm_eps(self._checkpoint) or EPS))

    def tensors(self, k: int, _layers: LatentLayers, products: Products) -> dict[str, Array]:
        """Return the matrices of the attention and the feed-forward layer of layer k, and the norm of the latent."""
        from tnlib_adapters.instrument.latent_attention import DOWN, QUERY, UP

        matrices, prefix = products.modules(), f"model.layers.{k}"
        feed_forward, stream = self._checkpoint.wiring.layers[k].feed_forward, self._stream_scale
        norm = self._checkpoint.wiring.layers[k].attention.norm
        down, weight = matrices[DOWN].astype(np.float64), np.ones(len(matrices[DOWN]))
        if norm is not None:
            weight = self._checkpoint.read(norm.weight)
        factors = linear_norm(down[:, : self._rank], weight)
        down[:, : self._rank] *= factors.down
        if feed_forward is not None:
            matrices[feed_forward.down.name] = stream * matrices[feed_forward.down.name]
        own = {
            "q_proj": matrices[QUERY],
            "kv_a_proj_with_mqa": down,
            "kv_b_proj": factors.up * matrices[UP],
            "o_proj": stream * products.product("o"),
        }
        tensors = {f"{prefix}.self_attn.{name}.weight": matrix.T for name, matrix in own.items()}
        tensors[f"{prefix}.self_attn.kv_a_layernorm.weight"] = np.full(self._rank, factors.weight)
        return tensors | _feed_forward_tensors(self._checkpoint, k, matrices)


# ------------------------------------------------------------------------- what all decoders of Llama's kind share


def _decoder_config(checkpoint: Checkpoint, neurons: int | None) -> dict[str, Any]:
    """Return the content of config.json outside the attention, with this number of neurons."""
    attention, sizes, original = checkpoint.wiring.layers[0].attention, checkpoint.sizes, dict(checkpoint.config)
    return {
        **{key: value for key, value in original.items() if key in _KEPT},
        "vocab_size": checkpoint.folder.tensors[checkpoint.wiring.embedding.table.weight].shape[0],
        "hidden_size": sizes.d_model,
        "intermediate_size": neurons,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "hidden_act": "silu",
        "max_position_embeddings": attention.context,
        "rms_norm_eps": _norm_eps(checkpoint),
        "tie_word_embeddings": False,
    }


def _no_experts(n_neurons: int | None) -> dict[str, Any]:
    """Return keys of experts, which no layer has: more than there are groups, as the loader of llama.cpp expects."""
    return {
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": n_neurons,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _norm_eps(checkpoint: Checkpoint) -> float | None:
    """Return eps of the norms of the stream."""
    norm = checkpoint.wiring.layers[0].attention.norm
    return None if norm is None else norm.required_eps("compress")


def _decoder_tensors(checkpoint: Checkpoint) -> Mapping[str, TensorInfo]:
    """Return embeddings, unembedding and norms by their new names; a tied unembedding is stored twice."""
    wiring, tensors = checkpoint.wiring, checkpoint.folder.tensors
    names = {"model.embed_tokens.weight": wiring.embedding.table.weight}
    for k, layer in enumerate(wiring.layers):
        norms = {"input_layernorm": layer.attention.norm, "post_attention_layernorm": _norm(layer)}
        names |= {f"model.layers.{k}.{new}.weight": norm.weight for new, norm in norms.items() if norm}
    names |= {"model.norm.weight": wiring.final_norm.weight} if wiring.final_norm else {}
    names |= {"lm_head.weight": wiring.unembedding.linear.weight} if wiring.unembedding else {}
    return {new: tensors[old] for new, old in names.items()}


def _feed_forward_tensors(checkpoint: Checkpoint, k: int, matrices: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of the feed-forward layer of layer k for its matrices (in, out) by module."""
    feed_forward = checkpoint.wiring.layers[k].feed_forward
    if feed_forward is None or feed_forward.gate is None:
        return {}
    gate, up = matrices[feed_forward.gate.name], matrices[feed_forward.up.name]
    if feed_forward.gate == feed_forward.up:  # the gate first
        gate, up = np.split(up, 2, axis=1)
    named = {"gate": gate, "up": up, "down": matrices[feed_forward.down.name]}
    return {f"model.layers.{k}.mlp.{name}_proj.weight": matrix.T for name, matrix in named.items()}


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
    """Return why a model is no dense decoder of Llama's kind, or None."""
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


def _has_biases(checkpoint: Checkpoint) -> bool:
    """Test if queries, keys or values have biases."""
    tensors, projections = checkpoint.folder.tensors, checkpoint.wiring.layers[0].attention.projections
    return any(linear.bias in tensors for held, linear in projections.items() if held != "o")


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


def _reason_of_latent(checkpoint: Checkpoint) -> str | None:
    """Return why multi-head latent attention cannot hold a dense decoder, or None."""
    if _has_biases(checkpoint):
        return "its queries, keys or values have biases"
    if any(info.dtype == "F16" for info in checkpoint.folder.tensors.values()):
        return "its weights are float16, in which the latent vectors underflow (convert it to bfloat16)"
    norms = [
        norm
        for layer in checkpoint.wiring.layers
        for norm in (layer.attention.norm, layer.second and layer.second.norm)
    ]
    stated = {norm.eps for norm in (*norms, checkpoint.wiring.final_norm) if norm}
    return "its norms have different eps" if len(stated) > 1 else None
