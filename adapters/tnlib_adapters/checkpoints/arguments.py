"""Arguments that many functions share: a checkpoint, one layer, the distance at which scores are read."""

from __future__ import annotations

from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.indices import as_distance
from tnlib_adapters.checkpoints.checkpoint import Checkpoint


def as_checkpoint(function: str, model: Any, parameter: str = "checkpoint") -> Checkpoint:
    """Refuse what is no checkpoint: a path, or a model of another library."""
    if not isinstance(model, Checkpoint):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a Checkpoint, got {type(model).__name__}; pass open_checkpoint(folder)."
        )
    return model


def as_layer(function: str, layer: Any, parameter: str = "attention") -> Attention:
    """Refuse what is no attention layer."""
    if not isinstance(layer, Attention):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be an Attention, got {type(layer).__name__}; "
            "pass one layer of a checkpoint, checkpoint.attention(0)."
        )
    return layer


def check_form(function: str, layer: Attention, distance: Any) -> None:
    """Refuse a layer whose scores are no bilinear form, or are one at every distance and none is given."""
    if layer.head_norm is not None:
        raise ArgumentError(
            f"{function}: scores of this model are no bilinear form, because its queries and keys are normalised; "
            "pass attention.numerator() of its layers, which leaves the two divisions out."
        )
    as_distance(function, distance, turned=layer.rotary is not None, sloped=layer.alibi is not None, most=layer.context)
