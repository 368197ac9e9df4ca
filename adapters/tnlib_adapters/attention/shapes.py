"""Whether the weights of one attention layer fit each other."""

from __future__ import annotations

from collections.abc import Mapping

from tnlib import ArgumentError
from tnlib._typing import Array


def check_shapes(arrays: Mapping[str, Array | None], n_columns: int) -> None:
    """Raise unless all arrays of an `Attention` fit its W_Q, and no more columns turn than a head has."""
    q, k = arrays["W_Q"], arrays["W_K"]
    if q is None or k is None or q.ndim != 3 or k.ndim != 3 or not len(k) or len(q) % len(k):
        got = " and ".join(str(None if a is None else a.shape) for a in (q, k))
        raise ArgumentError(
            "Attention: W_Q must have shape (heads, d_model, d_head) and W_K (kv_heads, d_model, d_head) with "
            f"kv_heads dividing heads, got {got}; reshape them per head."
        )
    (heads, d_model, d_head), kv_heads = q.shape, len(k)
    expected: dict[str, tuple[int, ...]] = {
        "W_K": (kv_heads, d_model, d_head),
        "W_V": (kv_heads, d_model, d_head),
        "W_O": (heads, d_head, d_model),
        "b_Q": (heads, d_head),
        "b_K": (kv_heads, d_head),
        "b_V": (kv_heads, d_head),
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
    if n_columns and arrays["alibi"] is not None:
        raise ArgumentError("Attention: rotary and alibi exclude each other, got both; pass one of them.")
