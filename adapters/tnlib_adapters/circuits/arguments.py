"""Validation of shared arguments: layers of a model, heads and their names, kinds of composition, output directions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, LowRank
from tnlib._typing import Array
from tnlib._validate import as_array, as_flag
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_layer, as_one_stream
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.reference.weights import read_norm
from tnlib_adapters.transforms.folding import fold

Kind = Literal["Q", "K", "V"]
READS: dict[Kind, str] = {"Q": "queries", "K": "keys", "V": "values"}  # what a head computes from its input


def head_name(head: Head) -> str:
    """Return the name of a head, "layer.head".

    >>> head_name((1, 3))
    '1.3'
    """
    return "{}.{}".format(*head)


AttentionHead = tuple[Attention, int]


def as_layers(function: str, model: Any) -> list[Attention]:
    """Return the attention layers of a checkpoint, or the given sequence of layers, all of one shape."""
    if isinstance(model, Checkpoint):
        return [as_one_stream(function, model, "model").attention(layer) for layer in range(model.n_layers)]
    layers = list(model) if isinstance(model, Sequence) else []
    if not layers or not all(isinstance(layer, Attention) for layer in layers):
        raise ArgumentTypeError(
            f"{function}: model must be a Checkpoint, a transformers model or a sequence of Attention, got "
            f"{type(model).__name__}; pass open_checkpoint(folder)."
        )
    check_self_attention(function, layers)
    sizes = [(layer.n_heads, layer.d_model, layer.d_head) for layer in layers]
    for k, (shape, next_shape) in enumerate(itertools.pairwise(sizes)):
        if shape != next_shape:
            raise ArgumentError(
                f"{function}: all layers must have one shape, got (heads, d_model, d_head) = {shape} in layer {k} and "
                f"{next_shape} in layer {k + 1}; pass the layers of one model."
            )
    return layers


def check_self_attention(function: str, layers: Sequence[Attention]) -> None:
    """Raise `ArgumentError` if one of these layers is cross-attention, which reads two sequences."""
    if any(layer.cross for layer in layers):
        raise ArgumentError(
            f"{function}: attention must read one sequence, got cross-attention, which reads two; use its qk and ov."
        )


class FoldedLayers(NamedTuple):
    """Attention layers of a model, with the norms before them folded into them."""

    layers: list[Attention]
    centred: bool  # whether the mean over features is projected out of the stream
    notes: tuple[str, ...]  # on what was folded, or could not be
    model: Any  # the folded checkpoint, or the model as it is


def as_folded_layers(function: str, model: Any, centred: bool | None) -> FoldedLayers:
    """Return the layers of a model for comparisons of heads, `centred` for None where LayerNorm precedes them."""
    folded, notes = _fold_norms_before_heads(model)
    layers = as_layers(function, folded)
    is_centred = has_layer_norm(model) if centred is None else as_flag(function, "centred", centred)
    return FoldedLayers(layers, is_centred, notes, folded)


def _fold_norms_before_heads(model: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a checkpoint with the norms before its heads folded into them, and notes; other models as they are."""
    if not isinstance(model, Checkpoint) or model.wiring.layers[0].attention.pre_norm is None or _is_folded(model):
        return model, ()
    if model.factored is not None:
        return model, ("not folded: norms, because weights are stored as factors",)
    folded = fold(model)
    notes = [f"folded: {text}" for text in folded.done] + [f"not folded: {text}" for text in folded.left]
    return folded.checkpoint, tuple(notes)


def _is_folded(model: Checkpoint) -> bool:
    """Test if norms before attention have unit weights and no biases, and values no biases, as after `fold`."""
    for layer in model.wiring.layers:
        norm = read_norm(model, layer.attention.pre_norm)
        if norm is not None and (np.any(norm.weight != 1) or (norm.bias is not None and norm.bias.any())):
            return False
    biases = (model.attention(layer).b_V for layer in range(model.n_layers))
    return all(bias is None or not bias.any() for bias in biases)


def as_head(function: str, layer: Any, head: Any) -> int:
    """Return the index of a head of an attention layer."""
    return as_index(function, "head", head, as_layer(function, layer, "layer").n_heads)


def as_two_heads(function: str, later: Any, earlier: Any) -> tuple[AttentionHead, AttentionHead]:
    """Return two heads as pairs (layer, head) of equal d_model."""
    for name, value in (("later", later), ("earlier", earlier)):
        if not isinstance(value, Sequence) or len(value) != 2:
            raise ArgumentTypeError(
                f"{function}: {name} must be a head, (layer, head), got {type(value).__name__}; "
                "pass for example (model.attention(1), 0)."
            )
    second, first = ((layer, as_head(function, layer, head)) for layer, head in (later, earlier))
    if second[0].d_model != first[0].d_model:
        raise ArgumentError(
            f"{function}: both layers must have one d_model, got {second[0].d_model} and {first[0].d_model}; "
            "take them from one model."
        )
    return second, first


def as_directions(function: str, directions: Array, d: int) -> Array:
    """Return real directions in output space, (d,) or (directions, d), validated."""
    w = as_array(function, "directions", directions)
    if w.dtype.kind == "c":
        raise ArgumentError(f"{function}: directions must be real, got {w.dtype}; pass columns of the unembedding.")
    if w.ndim not in (1, 2) or w.shape[-1] != d:
        raise ArgumentError(
            f"{function}: directions must have shape ({d},) or (directions, {d}), got {w.shape}; "
            "pass columns of the unembedding."
        )
    return w


def check_square_form(function: str, form: object) -> None:
    """Refuse anything but a real LowRank (d, d)."""
    if not isinstance(form, LowRank):
        raise ArgumentTypeError(
            f"{function}: form must be a LowRank, got {type(form).__name__}; pass attention.qk(head)."
        )
    if form.shape[0] != form.shape[1]:
        raise ArgumentError(f"{function}: form must be square, got shape {form.shape}; pass attention.qk(head).")
    if form.dtype.kind == "c":  # x Omega x^T of a complex Omega is not real, and has no extremes
        raise ArgumentError(f"{function}: form must be real, got {form.dtype}; pass attention.qk(head).")


def has_layer_norm(model: Any) -> bool:
    """Test if LayerNorm precedes the attention of a checkpoint; False for a sequence of layers."""
    if not isinstance(model, Checkpoint):
        return False
    norm = model.wiring.layers[0].attention.pre_norm
    return norm is not None and norm.kind == "layer"


def folded_moments(model: Checkpoint, folded: Checkpoint, layer: int, m: Array) -> Array:
    """Return second moments of the input y = n w + b of a layer as those of the folded input n w' + b'."""
    before, after = (read_norm(c, c.wiring.layers[layer].attention.pre_norm) for c in (model, folded))
    if before is None or after is None:
        return m
    # coordinates with w = 0 are constant before folding, and the folded weights do not read them
    ratio = np.divide(after.weight, before.weight, out=np.zeros_like(after.weight), where=before.weight != 0)
    biases = [np.zeros_like(ratio) if norm.bias is None else norm.bias for norm in (before, after)]
    to_folded = np.diag(np.append(ratio, 1.0))
    to_folded[-1, :-1] = biases[1] - biases[0] * ratio
    return np.asarray(to_folded.T @ m @ to_folded)  # d~ [d~] [d~] d~
