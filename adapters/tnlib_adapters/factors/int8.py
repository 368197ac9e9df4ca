"""Factors and weights in one byte a number, each slice with a scale of its own, rounded to nearest.

A slice belongs to one component of a product, or to one output of a plain weight, so that its scale takes up whatever
size a gauge gives to the component: of `left` (m, r) a column, of `right` (r, n) a row, of `weight` (in, out) a column.
The core of a Tucker has them along its largest leg. Scales keep the legs of what they multiply, size 1 in all but one.
Biases and other vectors stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tnlib._typing import Array

_FIRST = ("right", "core1")  # parts whose first leg is that of the slices
_LARGEST = ("core", "stack")  # without a leg of components; of all others it is the last


def round_slices(a: Array, leg: int, bits: int = 8) -> tuple[Array, Array]:
    """Return integers of so many bits and a float32 scale for every slice along a leg, so that `a` is about both.

    They run from -127 to 127, or from -7 to 7 for 4 bits: symmetric, so that 0 is 0.

    >>> q, scale = round_slices(np.array([[1.0, 20.0], [-0.5, 5.0]]), 1)
    >>> q.tolist(), scale.shape
    ([[127, 127], [-64, 32]], (1, 2))
    """
    others = tuple(k for k in range(a.ndim) if k != leg % a.ndim)
    top = 2 ** (bits - 1) - 1
    scale = (np.max(np.abs(a), axis=others, keepdims=True, initial=0.0) / top).astype(np.float32)
    scale[scale == 0] = 1.0
    return np.clip(np.rint(a / scale.astype(np.float64)), -top, top).astype(np.int8), scale


def narrow(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the arrays of a piece, those that can be in int8, and the scales of these."""
    stored, scales = dict(arrays), {}
    for part, a in arrays.items():
        if a.ndim > 1:
            stored[part], scales[part] = round_slices(a, _leg(part, a.shape))
    return stored, scales


def widen(arrays: Mapping[str, Array], scales: Mapping[str, Array]) -> dict[str, Array]:
    """Undo `narrow`, in float32 but for the rounding."""
    return {part: a * scales[part] if part in scales else a for part, a in arrays.items()}


def scale_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the shapes that the scales of parts of these shapes have."""
    return {
        part: [n if leg == _leg(part, shape) else 1 for leg, n in enumerate(shape)]
        for part, shape in shapes.items()
        if len(shape) > 1
    }


def _leg(part: str, shape: Sequence[int]) -> int:
    """Return the leg of which every slice has a scale."""
    if part in _LARGEST:
        return int(np.argmax(shape))
    return 0 if part in _FIRST else len(shape) - 1
