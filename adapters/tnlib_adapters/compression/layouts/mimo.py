"""MiMo-V2-Flash as the container of values that are narrower than queries and keys.

The architecture has widths of its own for both, and dense layers of Llama's kind if config.json says so in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.layouts.dense_decoder import (
    decoder_config,
    decoder_tensors,
    feed_forward_tensors,
    has_biases,
    no_experts,
    reason_to_refuse,
)
from tnlib_adapters.compression.layouts.layout_request import LayoutRequest, check_at_most
from tnlib_adapters.compression.layouts.narrowed_layers import NarrowedLayers, Widths, widths_of
from tnlib_adapters.compression.layouts.smaller_model import refuse, rope_of
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.files.tensor_file import TensorInfo


class MimoModel:
    """A model with values of width `v_head_dim`, written as a MiMoV2FlashForCausalLM; see `SmallerModel`."""

    what = "values"

    def __init__(self, checkpoint: Checkpoint, request: LayoutRequest) -> None:
        if reason := reason_to_refuse(checkpoint):
            refuse("mimo", checkpoint, reason)
        self._checkpoint, before = checkpoint, widths_of(checkpoint)
        if request.keep is None:
            width = check_at_most("v_head_dim", request.sizes["v_head_dim"], before.value)
        else:  # all compressed tensors are proportional to it
            width = math.floor(request.keep * before.value + 1e-9)
            check_at_most("v_head_dim", width, before.value)
        self._widths = Widths(before.head, width, before.neurons)

    def layers(self, workspace: Workspace) -> NarrowedLayers:
        """Return the layers, to be chosen and fitted."""
        return NarrowedLayers(self._checkpoint, self._widths, workspace)

    def config(self, _layers: NarrowedLayers) -> dict[str, Any]:
        """Return the content of config.json, with the names of transformers and those of vLLM, SGLang and llama.cpp."""
        checkpoint, attention = self._checkpoint, self._checkpoint.wiring.layers[0].attention
        sizes, n_layers = checkpoint.sizes, checkpoint.sizes.n_layers
        rope, turning = rope_of(attention), attention.frequencies(None, "compress")
        base, fraction = (rope or (1e4, 1.0))[0], 2 * len(turning.radians) / sizes.d_head if turning else 1.0
        shared = {
            **decoder_config(checkpoint, self._widths.neurons),
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.d_head,
            "v_head_dim": self._widths.value,
            "attention_bias": has_biases(checkpoint),
            "attention_value_scale": None,
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
            **shared,
            **_keys_of_engines(shared, base, fraction),
        }

    def copied(self) -> Mapping[str, TensorInfo]:
        """Return embeddings, unembedding and norms by their new names; a tied unembedding is stored twice."""
        return decoder_tensors(self._checkpoint)

    def scaled(self) -> Mapping[str, float]:
        """Return the factors of copied tensors."""
        return {}

    def tensors(self, k: int, layers: NarrowedLayers, products: Products) -> dict[str, Array]:
        """Return the projections and the feed-forward matrices of layer k."""
        projections, prefix = layers.narrow_projections(products), f"model.layers.{k}"
        biases = dict(projections.biases)
        if biases:
            biases = {name: biases.get(name, np.zeros(projections.weights[name].shape[1])) for name in "qkv"}
        tensors = {f"{prefix}.self_attn.{name}_proj.weight": w.T for name, w in projections.weights.items()}
        tensors |= {f"{prefix}.self_attn.{name}_proj.bias": bias for name, bias in biases.items()}
        matrices, _ = layers.narrow_feed_forward(k, products)
        return tensors | feed_forward_tensors(self._checkpoint, k, matrices)


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
        **no_experts(shared["intermediate_size"]),
    }
