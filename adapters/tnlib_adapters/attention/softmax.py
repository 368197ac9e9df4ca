"""Softmax, masked softmax and soft cap, of numpy arrays, or of torch tensors where gradients are needed."""

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
    tensor: Array = namespace(x).asarray(a if a.flags.writeable else a.copy())  # torch warns of read-only memory
    return tensor


def softmax(scores: Array, visible: Array | None = None) -> Array:
    """Return exp(scores) normalised over the last axis, 0 where `visible` is False.

    Every row needs a visible entry above -inf.

    >>> softmax(np.array([0.0, 0.0, 5.0]), np.array([True, True, False]))
    array([0.5, 0.5, 0. ])
    """
    if visible is not None:
        scores = namespace_of(scores).where(like(visible, scores), scores, -np.inf)
    if not isinstance(scores, np.ndarray):
        return scores.softmax(-1)
    shifted: Array = scores - scores.max(-1, keepdims=True)
    weights: Array = np.exp(shifted, out=shifted if shifted.dtype.kind == "f" else None)
    weights /= weights.sum(-1, keepdims=True)
    return weights


def log_softmax(scores: Array) -> Array:
    """Return the logarithm of `softmax`, finite where softmax underflows.

    >>> log_softmax(np.array([0.0, 1000.0]))
    array([-1000.,     0.])
    """
    if not isinstance(scores, np.ndarray):
        return scores.log_softmax(-1)
    shifted: Array = scores - scores.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def soft_capped(scores: Array, cap: float | None) -> Array:
    """Return cap * tanh(scores / cap), or the scores for None."""
    capped: Array = scores if cap is None else cap * namespace_of(scores).tanh(scores / cap)
    return capped
