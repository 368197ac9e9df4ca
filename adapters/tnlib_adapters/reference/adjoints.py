"""Adjoint derivatives of norms, feed-forward layers and experts: gradients of inputs from gradients of outputs."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.reference.activations import sigmoid
from tnlib_adapters.reference.layers import Experts, FeedForward, Norm, softmax


def norm_adjoint(norm: Norm, x: Array, grad: Array) -> Array:
    """Return the gradient of the input x (..., d_model) from that of the output of a norm, same shape."""
    return norm.centre(rms_adjoint(norm.centre(x), grad * norm.weight, norm.eps))


def rms_adjoint(x: Array, grad: Array, eps: float) -> Array:
    r"""Return the gradient of x from that of y = x / D with D = sqrt(mean(x^2) + eps), over the last axis.

    dx = (dy - y <dy, y> / n) / D, with <.,.> the inner product and n the length of the axis.
    """
    divisors = np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    y = x / divisors
    dx: Array = (grad - y * (grad * y).mean(-1, keepdims=True)) / divisors
    return dx


def feed_forward_adjoint(layer: FeedForward | Experts, x: Array, grad: Array) -> Array:
    """Return the gradient of the input x (..., d_model) from that of the output; the choice of experts is fixed."""
    return _experts_adjoint(layer, x, grad) if isinstance(layer, Experts) else _dense_adjoint(layer, x, grad)


def _dense_adjoint(layer: FeedForward, x: Array, grad: Array) -> Array:
    hidden = grad @ layer.down.weight.T  # ... [d] d_ff
    u = layer.up(x)
    if layer.gate is None:
        return np.asarray((hidden * layer.activation.derivative(u)) @ layer.up.weight.T)  # ... [d_ff] d
    g = layer.gate(x)
    through_up = (hidden * layer.activation(g)) @ layer.up.weight.T  # ... [d_ff] d
    through_gate = (hidden * u * layer.activation.derivative(g)) @ layer.gate.weight.T
    return np.asarray(through_up + through_gate)


def _experts_adjoint(layer: Experts, x: Array, grad: Array) -> Array:
    """Return the sum over experts of weight * d expert, and of d weight * expert."""
    weights, dx = layer.weights(x), np.zeros_like(x)
    d_weights = np.zeros_like(weights)
    for k, expert in enumerate(layer.experts):
        chosen = weights[..., k] > 0
        read, of_output = x[chosen], grad[chosen]
        dx[chosen] += weights[chosen, k, None] * _dense_adjoint(expert, read, of_output)
        d_weights[chosen, k] = (expert(read) * of_output).sum(-1)
    dx += _routing_adjoint(layer, x, weights > 0, d_weights) @ layer.router.weight.T  # ... [expert] d
    return dx if layer.shared is None else dx + _dense_adjoint(layer.shared, x, grad)


def _routing_adjoint(layer: Experts, x: Array, chosen: Array, grad: Array) -> Array:
    """Return the gradient of the router's output (..., experts) from that of the weights of chosen experts."""
    logits, by_softmax = layer.router(x), layer.routing.scores == "softmax"
    scores = softmax(logits) if by_softmax else sigmoid(logits)
    ds = np.where(chosen, layer.routing.factor * grad, 0.0)
    if layer.routing.normalised:
        kept = np.where(chosen, scores, 0.0)
        total = kept.sum(-1, keepdims=True)
        ds = np.where(chosen, ds / total - (ds * kept).sum(-1, keepdims=True) / total**2, 0.0)
    if by_softmax:
        return np.asarray(scores * (ds - (ds * scores).sum(-1, keepdims=True)))
    return np.asarray(ds * scores * (1 - scores))
