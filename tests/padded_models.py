"""Smaller models written back into the sizes of the original: zeros where a head or a layer became narrower."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tnlib_adapters import open_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.layouts.structured_pruning import RotaryPlanes
from tnlib_adapters.factors.projections import Projections, put_together


def padded(model: Any, source: Path, folder: Path) -> Any:
    """The model with the weights of a smaller one, whose values are the first columns of every head."""
    before, after = open_checkpoint(source), open_checkpoint(folder)
    new = copy.deepcopy(model)
    prefix = "" if hasattr(new, "embed_tokens") else f"{new.base_model_prefix}."
    with torch.no_grad():
        for layer in range(before.n_layers):
            attention = before.wiring.layers[layer].attention
            tensors = put_together(attention, _wide(before, after, layer)) | _neurons(before, after, layer)
            for name, values in tensors.items():
                parameter = new.get_parameter(prefix + name.removeprefix(before.prefix))
                parameter.copy_(torch.from_numpy(np.array(values)))
    return new


def planes_of(before: Checkpoint, after: Checkpoint) -> RotaryPlanes:
    """The rotary planes that the base and the linear factor of a narrower head stand for."""
    d, narrow = before.sizes.d_head, after.sizes.d_head
    old, new = (c.wiring.layers[0].attention.frequencies(None, "test") for c in (before, after))
    assert old is not None
    assert new is not None
    indices = [int(np.argmin(np.abs(np.log(old.radians / radians)))) for radians in new.radians]
    np.testing.assert_allclose(old.radians[indices], new.radians, rtol=1e-9)
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    return RotaryPlanes(indices[0], step, narrow // 2, d // 2)


def _wide(before: Checkpoint, after: Checkpoint, layer: int) -> Projections:
    sizes, narrow = before.sizes, after.projections(layer)
    every = np.arange(after.sizes.d_head)
    turned = every if after.sizes.d_head == sizes.d_head else planes_of(before, after).columns
    scale = after.wiring.layers[layer].attention.scale / before.wiring.layers[layer].attention.scale
    weights, biases = {}, {}
    for name, weight in narrow.weights.items():
        n_heads = sizes.n_heads if name in "qo" else sizes.kv_heads
        kept = np.arange(after.sizes.d_value) if name in "vo" else turned
        columns = (np.arange(n_heads)[:, None] * sizes.of_head(name) + kept).ravel()
        rows = np.zeros((n_heads * sizes.of_head(name), sizes.d_model), weight.dtype)
        rows[columns] = weight if name == "o" else (scale if name == "q" else 1) * weight.T
        weights[name] = rows if name == "o" else rows.T
        if name != "o" and name in narrow.biases:
            biases[name] = np.zeros(len(rows), weight.dtype)
            biases[name][columns] = (scale if name == "q" else 1) * narrow.biases[name]
    return Projections(weights, biases | {name: b for name, b in narrow.biases.items() if name == "o"})


def _neurons(before: Checkpoint, after: Checkpoint, layer: int) -> dict[str, np.ndarray]:
    """The matrices of the feed-forward layer with zeros for the neurons that are gone, those that are left first."""
    tensors = {}
    old, new = (c.wiring.layers[layer].feed_forward for c in (before, after))
    if old is None or new is None or len(old.matrices) != len(new.matrices):
        return {}
    for wide, narrow in zip(old.matrices, new.matrices, strict=True):
        shape, values = before.folder.tensors[wide.weight].shape, after.read(narrow.weight)
        axis = wide.input_axis if wide == old.down else wide.output_axis
        n_parts = 2 if wide == old.up == old.gate else 1
        tensors[wide.weight] = _stretched(values, shape, axis, n_parts)
        if wide.bias and narrow.bias:
            tensors[wide.bias] = _stretched(
                after.read(narrow.bias), before.folder.tensors[wide.bias].shape, 0, 1 if wide == old.down else n_parts
            )
    return tensors


def _stretched(values: np.ndarray, shape: tuple[int, ...], axis: int, n_parts: int) -> np.ndarray:
    out, old, new = np.zeros(shape, values.dtype), values.shape[axis] // n_parts, shape[axis] // n_parts
    kept = (np.arange(n_parts)[:, None] * new + np.arange(old)).ravel()
    np.moveaxis(out, axis, 0)[kept] = np.moveaxis(values, axis, 0)
    return out


def stated(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content
