"""The same architecture with narrower heads, by equally spaced rotary planes, and with fewer neurons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, with_folder
from tnlib_adapters.compression.layouts.layout_request import LayoutRequest, check_at_most
from tnlib_adapters.compression.layouts.narrowed_layers import NarrowedLayers, Widths, widths_of
from tnlib_adapters.compression.layouts.rotary_planes import RotaryPlanes
from tnlib_adapters.compression.layouts.smaller_model import HEADS_OF_OTHER_KINDS, first_reason, refuse, rope_of
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.sizes import attention_tensors, count_matrix
from tnlib_adapters.factors.projections import Products, put_together
from tnlib_adapters.files.tensor_file import TensorInfo

_HEAD, _NEURONS = "head_dim", "intermediate_size"


class NarrowModel:
    """A model with smaller `head_dim` and `intermediate_size`; see `SmallerModel`."""

    def __init__(self, checkpoint: Checkpoint, request: LayoutRequest) -> None:
        if any(layer.attention.latent for layer in checkpoint.wiring.layers):
            refuse("narrow", checkpoint, "its keys and values are made from latent vectors")
        self._checkpoint, self._before = checkpoint, widths_of(checkpoint)
        self._widths = self._requested(request)
        if self._widths.head < self._before.head:
            self._check_heads()
        heads, neurons = self._widths.head < self._before.head, self._widths.neurons != self._before.neurons
        self.what = "layers" if heads and neurons else "mlp" if neurons else "attention"

    def layers(self, workspace: Workspace) -> NarrowedLayers:
        """Return the layers, to be chosen and fitted."""
        return NarrowedLayers(self._checkpoint, self._widths, workspace)

    def _requested(self, request: LayoutRequest) -> Widths:
        """Return the widths of a request; for a fraction, heads first, and as many neurons as the rest admits."""
        before = self._before
        if request.keep is None:
            head = check_at_most(_HEAD, request.sizes.get(_HEAD, before.head), before.head)
            neurons = before.neurons
            if _NEURONS in request.sizes:
                self._check_neurons()
                neurons = check_at_most(_NEURONS, request.sizes[_NEURONS], neurons or 0)
            if head % 2 and head < before.head:
                refuse("narrow", self._checkpoint, f"{_HEAD} must be even, got {head}", "pass an even number")
            return Widths(head, head if head < before.head else before.value, neurons)
        self._check_heads()
        self._check_neurons()
        head = max(2, 2 * math.floor(request.keep * before.head / 2 + 1e-9))
        return Widths(head, head, self._neurons_within(request.keep, head))

    def _neurons_within(self, keep: float, head: int) -> int:
        """Return the largest number of neurons with which attention and feed-forward layers store the fraction."""
        checkpoint, layers = self._checkpoint, self._checkpoint.wiring.layers
        attention = [info.size for k in range(len(layers)) for info in attention_tensors(checkpoint, k)]
        matrices = [count_matrix(checkpoint, m.name) for layer in layers for m in layer.feed_forward_matrices]
        left = keep * (sum(attention) + sum(matrices)) - sum(attention) * head / self._before.head
        return max(1, math.floor(left / (sum(matrices) / (self._before.neurons or 1)) + 1e-9))

    # --------------------------------------------------------------------------------------------- what is written

    def config(self, layers: NarrowedLayers) -> dict[str, Any]:
        """Return the content of config.json: that of the original with other sizes and rotary frequencies."""
        changed: dict[str, Any] = {_HEAD: self._widths.head} if self._widths.head < self._before.head else {}
        changed |= {_NEURONS: self._widths.neurons} if self._widths.neurons != self._before.neurons else {}
        return {**self._checkpoint.config, **changed, **self._rope(layers.planes)}

    def copied(self) -> Mapping[str, TensorInfo]:
        """Return all tensors but those of attention and feed-forward layers."""
        layers, tensors = self._checkpoint.wiring.layers, self._checkpoint.folder.tensors
        changed = {info.name for k in range(len(layers)) for info in attention_tensors(self._checkpoint, k)}
        matrices = [matrix for layer in layers for matrix in layer.feed_forward_matrices]
        changed |= {name for matrix in matrices for name in (matrix.weight, matrix.bias) if name}
        return {name: info for name, info in tensors.items() if name not in changed}

    def scaled(self) -> Mapping[str, float]:
        """Return the factors of copied tensors."""
        return {}

    def tensors(self, k: int, layers: NarrowedLayers, products: Products) -> dict[str, Array]:
        """Return the tensors of the attention and the feed-forward layer of layer k under their names."""
        layer, narrow = self._checkpoint.wiring.layers[k], self._narrow_attention(k)
        projections = layers.narrow_projections(products, query_scale=layer.attention.scale / narrow.scale)
        tensors, (matrices, biases) = put_together(narrow, projections), layers.narrow_feed_forward(k, products)
        for linear in layer.feed_forward_matrices:
            tensors[linear.weight] = np.ascontiguousarray(linear.on_rows(matrices[linear.name]))
            tensors |= {linear.bias: biases[linear.name]} if linear.bias else {}
        return tensors

    def _narrow_attention(self, k: int) -> Any:
        """Return the wiring of the attention of the narrow model, with its own scale of the scores."""
        changed = {_HEAD: self._widths.head} if self._widths.head < self._before.head else {}
        return self._with_config(changed).wiring.layers[k].attention

    def _with_config(self, changed: Mapping[str, Any]) -> Checkpoint:
        folder = self._checkpoint.folder
        return with_folder(self._checkpoint, replace(folder, config={**folder.config, **changed}))

    def _rope(self, planes: RotaryPlanes | None) -> dict[str, Any]:
        """Return the keys of config.json with the rotary frequencies of the planes."""
        rope = rope_of(self._checkpoint.wiring.layers[0].attention)
        if planes is None or rope is None:
            return {}
        base, factor = planes.base(rope[0]), rope[1] * planes.factor(rope[0])
        kind = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
        config = dict(self._checkpoint.config)
        if "rope_parameters" in config:
            beside = {"rope_theta": base} if "rope_theta" in config else {}
            return {"rope_parameters": {**kind, "rope_theta": base}} | beside
        return {"rope_theta": base, "rope_scaling": None if factor == 1 else {**kind, "type": "linear"}}

    # ---------------------------------------------------------------------------------------------------- refusals

    def _check_heads(self) -> None:
        """Raise unless config.json may state a narrower head."""
        checkpoint, sizes = self._checkpoint, self._checkpoint.sizes
        advice = f"pass sizes={{'{_NEURONS}': ...}} (--size {_NEURONS}=...) to leave the heads as they are"
        if reason := first_reason(checkpoint.wiring.layers, HEADS_OF_OTHER_KINDS):
            refuse("narrow", checkpoint, reason, advice)
        rotated = checkpoint.wiring.layers[0].attention.frequencies(None, "compress")
        if rotated is not None and 2 * len(rotated.radians) < sizes.d_head:
            refuse("narrow", checkpoint, "some columns of its heads are not rotated", advice)
        if len({rope_of(layer.attention) for layer in checkpoint.wiring.layers}) > 1:
            refuse("narrow", checkpoint, "its layers have different rotary frequencies", advice)
        if sizes.d_value != sizes.d_head or self._with_config({_HEAD: 2}).sizes.d_head != 2:
            refuse("narrow", checkpoint, f"its config.json has no {_HEAD} of all heads", advice)

    def _check_neurons(self) -> None:
        """Raise unless config.json states the number of neurons."""
        checkpoint, stated = self._checkpoint, dict(self._checkpoint.config)
        if any(layer.feed_forward is None for layer in checkpoint.wiring.layers):
            refuse("narrow", checkpoint, "not all of its layers have one feed-forward layer")
        if stated.get(_NEURONS) != self._before.neurons:
            refuse("narrow", checkpoint, f"its config.json has no {_NEURONS}")
