"""Activation functions and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array

_LEAST = 1e-30  # stands for 0 in quotients: normal in single precision, and f(x) / x has reached its limit there


@dataclass(frozen=True)
class Activation:
    """A function of one variable, applied elementwise, and its derivative."""

    function: Callable[[Array], Array]
    derivative: Callable[[Array], Array]

    def __call__(self, x: Array) -> Array:
        """Return f(x), elementwise."""
        return self.function(x)

    def secant(self, x: Array) -> Array:
        """Return f(x) / x, the slope of the line from the origin, for f(0) = 0; at 0 its limit from the right."""
        nonzero = np.where(np.abs(x) < _LEAST, x.dtype.type(_LEAST), x)
        slope: Array = self.function(nonzero) / nonzero
        return slope


def _erf_gelu(x: Array) -> Array:
    return x * _normal_cdf(x)


def _erf_gelu_derivative(x: Array) -> Array:
    y: Array = _normal_cdf(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return y


def _normal_cdf(x: Array) -> Array:
    from scipy.special import erf

    y: Array = 0.5 * (1 + erf(x / math.sqrt(2)))
    return y


def _tanh_gelu(c: float, cubic: float) -> Activation:
    """Return x (1 + tanh(c x + cubic x^3)) / 2 and its derivative."""

    def _function(x: Array) -> Array:
        y: Array = 0.5 * x * (1 + np.tanh(x * (c + cubic * x * x)))
        return y

    def _derivative(x: Array) -> Array:
        t = np.tanh(x * (c + cubic * x * x))
        y: Array = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (c + 3 * cubic * x * x)
        return y

    return Activation(_function, _derivative)


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def _relu_derivative(x: Array) -> Array:
    return (x > 0).astype(x.dtype)


def _scaled_silu(c: float) -> Activation:
    """Return x sigmoid(c x) and its derivative."""

    def _function(x: Array) -> Array:
        return x * sigmoid(c * x)

    def _derivative(x: Array) -> Array:
        s = sigmoid(c * x)
        y: Array = s + c * x * s * (1 - s)
        return y

    return Activation(_function, _derivative)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow.

    >>> sigmoid(np.array([0.0, -1000.0]))
    array([0.5, 0. ])
    """
    y: Array = 0.5 * (1 + np.tanh(0.5 * x))
    return y


_GELU_TANH = _tanh_gelu(math.sqrt(2 / math.pi), math.sqrt(2 / math.pi) * 0.044715)
_SILU = _scaled_silu(1.0)

# Keys are the names in config.json.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(_erf_gelu, _erf_gelu_derivative),
    # not a name of any config: the tanh approximation with BLOOM's truncated constant for sqrt(2 / pi)
    "gelu_bloom": _tanh_gelu(0.79788456, 0.79788456 * 0.044715),
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "quick_gelu": _scaled_silu(1.702),
    "relu": Activation(_relu, _relu_derivative),
    "silu": _SILU,
    "swish": _SILU,
}
