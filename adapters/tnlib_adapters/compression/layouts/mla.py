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
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.layouts.dense_decoder import (
    decoder_config,
    decoder_tensors,
    feed_forward_tensors,
    has_biases,
    no_experts,
    norm_eps,
    reason_to_refuse,
)
from tnlib_adapters.compression.layouts.latent_layers import LatentLayers
from tnlib_adapters.compression.layouts.latent_norm import EPS, linear_norm
from tnlib_adapters.compression.layouts.layout_request import LayoutRequest, check_at_most
from tnlib_adapters.compression.layouts.narrowed_layers import widths_of
from tnlib_adapters.compression.layouts.smaller_model import refuse
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.files.tensor_file import TensorInfo

_RANK, _ROTATED = "kv_lora_rank", "qk_rope_head_dim"


class MlaModel:
    """A model with a latent vector of `kv_lora_rank` columns and a rotated key of `qk_rope_head_dim`.

    It is written as a DeepseekV3ForCausalLM; see `SmallerModel`.
    """

    what = "attention"

    def __init__(self, checkpoint: Checkpoint, request: LayoutRequest) -> None:
        if reason := reason_to_refuse(checkpoint) or _reason_of_latent(checkpoint):
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
            **decoder_config(self._checkpoint, neurons),
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
            **no_experts(neurons),
            "first_k_dense_replace": sizes.n_layers,
            "moe_layer_freq": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
        }

    def copied(self) -> Mapping[str, TensorInfo]:
        """Return embeddings, unembedding and norms by their new names; a tied unembedding is stored twice."""
        return decoder_tensors(self._checkpoint)

    def scaled(self) -> Mapping[str, float]:
        """Return the factor of the embeddings if eps of the norms is another."""
        return {} if self._stream_scale == 1 else {"model.embed_tokens.weight": self._stream_scale}

    @property
    def _stream_scale(self) -> float:
        """Factor of the residual stream, which its norms remove: a x / sqrt(a^2 |x|^2 + eps) for a^2 = eps / old."""
        return math.sqrt(EPS / (norm_eps(self._checkpoint) or EPS))

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
        return tensors | feed_forward_tensors(self._checkpoint, k, matrices)


def _reason_of_latent(checkpoint: Checkpoint) -> str | None:
    """Return why multi-head latent attention cannot hold a dense decoder, or None."""
    if has_biases(checkpoint):
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
