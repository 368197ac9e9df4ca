"""Validate the arguments of attention: indices, distances, streams, and the types and shapes of its weights."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, to_numpy
from tnlib_adapters.attention.norms import HeadNorm, LatentNorm
from tnlib_adapters.attention.relative_bias import RelativeBias
from tnlib_adapters.attention.rotary import Rotary


def as_index(function: str, parameter: str, value: Any, count: int) -> int:
    """Return an index in 0 ... count - 1; negative values count from the end.

    A scalar array, such as an argmax of torch, is its number.
    """
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ArgumentTypeError(f"{function}: {parameter} must be an integer, got {value!r}; count from 0.")
    if not -count <= value < count:
        raise ArgumentError(
            f"{function}: {parameter} must lie between 0 and {count - 1}, got {value}; there are {count} of them."
        )
    return int(value) % count


def as_distances(function: str, parameter: str, distances: Any, context: int | None) -> Array:
    """Return integer distances (distances,) within the context."""
    a = to_numpy(function, parameter, distances)
    if a.ndim == 1 and not a.size:
        raise ArgumentError(
            f"{function}: {parameter} must hold at least one distance, got none; pass for example range(10)."
        )
    if a.ndim != 1 or a.dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"{function}: {parameter} must be integers, got {distances!r:.80}; "
            "count positions from the key to the query."
        )
    if context is not None and (a.max() >= context or a.min() <= -context):
        outside = a[(a >= context) | (a <= -context)][0]
        raise ArgumentError(
            f"{function}: {parameter} must lie within the context of {context} positions, got {outside}; "
            "the model was not made for longer sequences."
        )
    return a.astype(np.int64)


def as_stream(function: str, parameter: str, x: Any, d_model: int, context: int | None) -> Array:
    """Return the stream of one sequence, (positions, d_model) with at most `context` positions, validated."""
    a = as_array(function, parameter, x)
    if a.ndim != 2 or a.shape[1] != d_model:
        raise ArgumentError(
            f"{function}: {parameter} must have shape (positions, {d_model}), got {a.shape}; "
            "pass one sequence at a time."
        )
    if context is not None and len(a) > context:
        raise ArgumentError(
            f"{function}: {parameter} must hold at most {context} positions, as many as the model was made for, got "
            f"{len(a)}; shorten it."
        )
    return a


def check_facts(rotary: Any, relative_bias: Any, head_norm: Any, latent_norm: Any, **numbers_or_none: Any) -> None:
    """Raise unless positions and norms have their types or are None, and the numbers are positive or None."""
    for name, value, kind in (
        ("rotary", rotary, Rotary),
        ("relative_bias", relative_bias, RelativeBias),
        ("head_norm", head_norm, HeadNorm),
        ("latent_norm", latent_norm, LatentNorm),
    ):
        if value is not None and not isinstance(value, kind):
            raise ArgumentTypeError(
                f"Attention: {name} must be a {kind.__name__} or None, got a {type(value).__name__}; make one first."
            )
    for name, value in numbers_or_none.items():
        kind_of_number = numbers.Real if name == "softcap" else numbers.Integral
        if value is not None and (not isinstance(value, kind_of_number) or isinstance(value, bool)):
            raise ArgumentTypeError(
                f"Attention: {name} must be a number or None, got {value!r}; leave it out for none."
            )
        if value is not None and not float(value) > 0:
            raise ArgumentError(f"Attention: {name} must be positive, got {value!r}; leave it out for none.")


def check_shapes(arrays: Mapping[str, Array | None], n_columns: int, relative_bias: RelativeBias | None) -> None:
    """Raise unless all array shapes match W_Q, and positions enter the scores in one way that fits the heads."""
    q, k = arrays["W_Q"], arrays["W_K"]
    if q is None or k is None or q.ndim != 3 or k.ndim != 3 or not len(k) or len(q) % len(k):
        shapes = " and ".join(str(None if a is None else a.shape) for a in (q, k))
        raise ArgumentError(
            "Attention: W_Q must have shape (heads, d_model, d_head) and W_K (kv_heads, d_model, d_head) with "
            f"kv_heads dividing heads, got {shapes}; reshape them per head."
        )
    (heads, d_model, d_head), kv_heads, v = q.shape, len(k), arrays["W_V"]
    d_value = d_head if v is None or v.ndim != 3 else v.shape[2]
    expected: dict[str, tuple[int, ...]] = {
        "W_K": (kv_heads, d_model, d_head),
        "W_V": (kv_heads, d_model, d_value),
        "W_O": (heads, d_value, d_model),
        "b_Q": (heads, d_head),
        "b_K": (kv_heads, d_head),
        "b_V": (kv_heads, d_value),
        "b_O": (d_model,),
        "alibi": (heads,),
    }
    for name, shape in expected.items():
        value = arrays[name]
        if value is not None and value.shape != shape:
            raise ArgumentError(
                f"Attention: {name} must have shape {shape} beside W_Q {q.shape}, got {value.shape}; "
                "weights act on rows, per head."
            )
    if n_columns > d_head:
        raise ArgumentError(
            f"Attention: rotary must turn at most the {d_head} columns of a head, got {n_columns}; "
            "pass one frequency per plane of two columns."
        )
    if relative_bias is not None and len(relative_bias.table) != heads:
        raise ArgumentError(
            f"Attention: relative_bias must have one row for each of {heads} heads, got {len(relative_bias.table)}; "
            "pass (heads, bins)."
        )
    ways = {"rotary": n_columns or None, "alibi": arrays["alibi"], "relative_bias": relative_bias}
    parameters = [name for name, value in ways.items() if value is not None]
    if len(parameters) > 1:
        raise ArgumentError(f"Attention: {' and '.join(parameters)} exclude each other, got both; pass one of them.")
