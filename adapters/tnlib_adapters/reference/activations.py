"""Activation functions and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.softmax import library_of, like


@dataclass(frozen=True)
class Activation:
    """A function f of one variable with f(0) = 0, applied elementwise.

    Parameters
    ----------
    secant
        f(x) / x, the slope of the line from the origin; at 0 its limit from the right.
    derivative
        f'(x).
    """

    secant: Callable[[Array], Array]
    derivative: Callable[[Array], Array]

    def __call__(self, x: Array) -> Array:
        """Return f(x), elementwise; for a tensor of torch also its gradient f'(x)."""
        if not isinstance(x, np.ndarray):
            at = x.detach().numpy()
            return like(self(at), x) + like(self.derivative(at), x) * (x - x.detach())
        y = self.secant(x)
        y *= x  # in place: a new array of this size costs as much as the product
        return y


def _erf_gelu_derivative(x: Array) -> Array:
    y: Array = _normal_cdf(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return y


def _normal_cdf(x: Array) -> Array:
    from scipy.special import erf

    y: Array = 0.5 * (1 + erf(x / math.sqrt(2)))
    return y


def _tanh_gelu(c: float, cubic: float) -> Activation:
    """Return x (1 + tanh(c x + cubic x^3)) / 2."""

    def _tanh(x: Array) -> Array:
        y: Array = x * x
        y *= cubic
        y += c
        y *= x
        return np.tanh(y, out=y)

    def _secant(x: Array) -> Array:
        y = _tanh(x)
        y += 1
        y *= 0.5
        return y

    def _derivative(x: Array) -> Array:
        t = _tanh(x)
        y: Array = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (c + 3 * cubic * x * x)
        return y

    return Activation(_secant, _derivative)


def _step(x: Array) -> Array:
    return (x >= 0).astype(x.dtype)


def _relu_derivative(x: Array) -> Array:
    return (x > 0).astype(x.dtype)


def _scaled_silu(c: float) -> Activation:
    """Return x sigmoid(c x)."""

    def _secant(x: Array) -> Array:
        return sigmoid(c * x)

    def _derivative(x: Array) -> Array:
        s = sigmoid(c * x)
        y: Array = s + c * x * s * (1 - s)
        return y

    return Activation(_secant, _derivative)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow.

    >>> sigmoid(np.array([0.0, -1000.0]))
    array([0.5, 0. ])
    """
    y: Array = 0.5 * (1 + library_of(x).tanh(0.5 * x))
    return y


_GELU_TANH = _tanh_gelu(math.sqrt(2 / math.pi), math.sqrt(2 / math.pi) * 0.044715)
_SILU = _scaled_silu(1.0)

# Keys are the names in config.json.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(_normal_cdf, _erf_gelu_derivative),
    # not a name of any config: the tanh approximation with BLOOM's truncated constant for sqrt(2 / pi)
    "gelu_bloom": _tanh_gelu(0.79788456, 0.79788456 * 0.044715),
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "quick_gelu": _scaled_silu(1.702),
    "relu": Activation(_step, _relu_derivative),
    "silu": _SILU,
    "swish": _SILU,
}
