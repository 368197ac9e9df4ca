"""int8 quantization of factors and weights: symmetric, rounded to nearest, with one scale per slice.

A slice belongs to one component of a product, or to one output of a dense weight, so that its scale absorbs the norm of
the component in any gauge: a column of `left` (m, r), a row of `right` (r, n), a column of `weight` (in, out). The core
of a Tucker has slices along its largest axis. Scales broadcast against the array they multiply. Biases and other
vectors are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tnlib._typing import Array

_FIRST = ("right", "core1")  # parts with slices along the first axis
_LARGEST = ("core", "stack")  # parts with slices along the largest axis; of all others it is the last


def round_slices(a: Array, leg: int, bits: int = 8) -> tuple[Array, Array]:
    """Return integers of `bits` bits and a float32 scale per slice along an axis; their product approximates `a`.

    The integers run from -127 to 127, or from -7 to 7 for 4 bits: symmetric, so that 0 is exact.

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
    """Return the arrays, those with at least two axes quantized to int8, and the scales of these."""
    stored, scales = dict(arrays), {}
    for part, a in arrays.items():
        if a.ndim > 1:
            stored[part], scales[part] = round_slices(a, _leg(part, a.shape))
    return stored, scales


def widen(arrays: Mapping[str, Array], scales: Mapping[str, Array]) -> dict[str, Array]:
    """Undo `narrow` up to rounding, in float32."""
    return {part: a * scales[part] if part in scales else a for part, a in arrays.items()}


def scale_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the shapes of the scales for parts of these shapes."""
    return {
        part: [n if leg == _leg(part, shape) else 1 for leg, n in enumerate(shape)]
        for part, shape in shapes.items()
        if len(shape) > 1
    }


def _leg(part: str, shape: Sequence[int]) -> int:
    """Return the axis along which slices have scales."""
    if part in _LARGEST:
        return int(np.argmax(shape))
    return 0 if part in _FIRST else len(shape) - 1
