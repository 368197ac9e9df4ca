"""The parts of a layer that are not attention: affine maps, layer norms, activations, softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array

Activation = Callable[[Array], Array]


@dataclass(frozen=True)
class Affine:
    """An affine map of rows; `weight` (in, out), `bias` (out,) or None."""

    weight: Array
    bias: Array | None

    def __call__(self, x: Array) -> Array:
        """Return x @ weight + bias, (..., out) for x (..., in)."""
        y = x @ self.weight  # ... [in] out
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Norm:
    """LayerNorm; `weight` and `bias` (d_model,)."""

    weight: Array
    bias: Array
    eps: float

    def __call__(self, x: Array) -> Array:
        """Return every row brought to mean 0 and variance 1, times weight plus bias."""
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        y: Array = centred / np.sqrt(variance + self.eps) * self.weight + self.bias
        return y


@dataclass(frozen=True)
class FeedForward:
    """The layer between attention layers: wider, bent, narrow again."""

    up: Affine
    down: Affine
    activation: Activation

    def __call__(self, x: Array) -> Array:
        """Return down(activation(up(x)))."""
        return self.down(self.activation(self.up(x)))


def softmax(scores: Array) -> Array:
    """Return exp(scores) normalised over the last leg; every row must hold something above -inf.

    >>> softmax(np.array([0.0, 0.0, -np.inf]))
    array([0.5, 0.5, 0. ])
    """
    weights: Array = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def log_softmax(scores: Array) -> Array:
    """Return the logarithm of `softmax`, finite where softmax underflows.

    >>> log_softmax(np.array([0.0, 1000.0]))
    array([-1000.,     0.])
    """
    shifted: Array = scores - scores.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _gelu(x: Array) -> Array:
    from scipy.special import erf

    y: Array = 0.5 * x * (1 + erf(x / math.sqrt(2)))
    return y


def _gelu_tanh(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return y


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def _silu(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.tanh(0.5 * x))  # x / (1 + exp(-x)) without overflow
    return y


# Names as config.json has them.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": _relu,
    "silu": _silu,
}
