"""Softmax, masked softmax, soft cap and products of numpy arrays, or of torch tensors where gradients are needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._array_api import namespace
from tnlib._typing import Array


def namespace_of(x: Array) -> Any:
    """Return numpy for an array, the namespace of the array API standard for a tensor of torch."""
    return np if isinstance(x, np.ndarray) else namespace(x)


def like(a: Array, x: Array) -> Array:
    """Return the array `a` in the library of x, without a copy where it is writeable."""
    if isinstance(x, np.ndarray):
        return a
    from tnlib_adapters.attention.tensor_product import as_tensor

    return as_tensor(a)


def matmul(a: Array, b: Array) -> Array:
    """Return a @ b (..., m, n), both of numpy or both of torch on the host, of at least two legs."""
    if isinstance(a, np.ndarray):
        return a @ b
    from tnlib_adapters.attention.tensor_product import tensor_product

    product: Array = tensor_product(a, b)
    return product


def softmax(scores: Array, visible: Array | None = None) -> Array:
    """Return exp(scores) normalised over the last axis, 0 where `visible` is False.

    Every row needs a visible entry above -inf.

    >>> softmax(np.array([0.0, 0.0, 5.0]), np.array([True, True, False]))
    array([0.5, 0.5, 0. ])
    """
    if not isinstance(scores, np.ndarray):
        # As a sum, which has no derivative to store, and no gradient of its own beside that of the softmax.
        masked = scores if visible is None else scores + namespace(scores).where(like(visible, scores), 0.0, -np.inf)
        return masked.softmax(-1)
    out = None
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
        out = scores  # a copy, that may be overwritten
    shifted: Array = np.subtract(scores, scores.max(-1, keepdims=True), out=out)
    weights: Array = np.exp(shifted, out=shifted if shifted.dtype.kind == "f" else None)
    weights /= weights.sum(-1, keepdims=True, dtype=np.float64)
    return weights


def log_softmax(scores: Array) -> Array:
    """Return the logarithm of `softmax`, finite where softmax underflows.

    >>> log_softmax(np.array([0.0, 1000.0]))
    array([-1000.,     0.])
    """
    if not isinstance(scores, np.ndarray):
        return scores.log_softmax(-1)
    shifted: Array = scores - scores.max(-1, keepdims=True)
    # numpy adds in pairs along contiguous axes alone: in single precision, other orders lose 3 digits of 50,000 terms
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64))
    return shifted


def soft_capped(scores: Array, cap: float | None) -> Array:
    """Return cap * tanh(scores / cap), or the scores for None."""
    capped: Array = scores if cap is None else cap * namespace_of(scores).tanh(scores / cap)
    return capped
