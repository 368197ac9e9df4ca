"""What stands for a model: a checkpoint, or its attention layers alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.checkpoint import Checkpoint


def as_layers(function: str, model: Any) -> list[Attention]:
    """Return the attention layers of a checkpoint, or those that were given, all of one shape."""
    if isinstance(model, Checkpoint):
        return [model.attention(layer) for layer in range(model.n_layers)]
    layers = list(model) if isinstance(model, Sequence) else []
    if not layers or not all(isinstance(layer, Attention) for layer in layers):
        raise ArgumentTypeError(
            f"{function}: model must be a Checkpoint or a sequence of Attention, got {type(model).__name__}; "
            "pass open_checkpoint(folder)."
        )
    sizes = [(layer.n_heads, layer.d_model, layer.d_head) for layer in layers]
    for k, (one, other) in enumerate(itertools.pairwise(sizes)):
        if one != other:
            raise ArgumentError(
                f"{function}: all layers must have one shape, got (heads, d_model, d_head) = {one} in layer {k} and "
                f"{other} in layer {k + 1}; pass the layers of one model."
            )
    return layers


def has_layer_norm(model: Any) -> bool:
    """Whether LayerNorm stands in front of the attention of a checkpoint; layers alone do not say."""
    if not isinstance(model, Checkpoint):
        return False
    row = model.architecture
    place = row.norm_place(model.config) if callable(row.norm_place) else row.norm_place
    return row.norm == "layer" and place == "before"
