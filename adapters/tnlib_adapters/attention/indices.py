"""Validate indices of layers, heads and planes, and distances."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, to_numpy


def as_index(function: str, parameter: str, value: Any, count: int) -> int:
    """Return an index in 0 ... count - 1; negative values count from the end."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ArgumentTypeError(f"{function}: {parameter} must be an integer, got {value!r}; count from 0.")
    if not -count <= value < count:
        raise ArgumentError(
            f"{function}: {parameter} must lie between 0 and {count - 1}, got {value}; there are {count} of them."
        )
    return int(value) % count


def as_distance(function: str, distance: Any, *, turned: bool, shifted: bool, most: int | None) -> int:
    """Return one distance within the context; 0 for None where scores do not depend on it."""
    if distance is None and (turned or shifted):
        why = "rotary embeddings turn queries and keys" if turned else "ALiBi or a relative bias adds to them"
        raise ArgumentError(
            f"{function}: distance must be given, because scores depend on it ({why}), got None; "
            "pass the position of the query less that of the key, for example distance=1."
        )
    if distance is not None and (not isinstance(distance, int | np.integer) or isinstance(distance, bool)):
        raise ArgumentTypeError(
            f"{function}: distance must be an integer, got {distance!r:.80}; count positions from the key to the query."
        )
    return int(as_distances(function, "distance", [0 if distance is None else distance], most)[0])


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
