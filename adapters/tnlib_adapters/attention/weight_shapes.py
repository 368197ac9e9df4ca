"""Validate types and shapes of the arguments of `Attention`."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib_adapters.attention.head_norm import HeadNorm
from tnlib_adapters.attention.latent_norm import LatentNorm
from tnlib_adapters.attention.relative_bias import RelativeBias
from tnlib_adapters.attention.rotary import Rotary


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
