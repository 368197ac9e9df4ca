r"""Attention between norms with patterns and divisors frozen, as an affine map of the residual stream.

With C the projection that centres the features (the identity for RMSNorm), w and b the weight and bias of a norm and D
its divisors, head h between a norm before (1) and a norm behind (2) is

    D2^-1 A^h D1^-1 (x) (C1 diag(w1) W_V^h W_O^h C2 diag(w2))^T

so it stays one Kronecker product. The constant has (b1 W_V + b_V) W_O for every row sum of A^h, then b_O and b2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.frozen.layer import FrozenAttention, frozen_heads
from tnlib_adapters.reference.layers import softmax
from tnlib_adapters.reference.weights import Branch
from tnlib_adapters.transforms.frozen_norm import FrozenNorm


@dataclass(frozen=True, eq=False)
class FrozenHeads:
    """An attention layer on one sequence.

    Parameters
    ----------
    layer
        The attention layer, which reads the output of the norm `before`.
    before
        Norm of the stream, or None.
    input
        (n, d_model), what the layer reads.
    operator
        The layer as an affine map of the stream, norms included.
    patterns
        (heads, n, n), attention weights.
    output
        (n, d_model), the output for the stream itself, norms included.
    """

    layer: Attention
    before: FrozenNorm | None
    input: Array
    operator: FrozenAttention
    patterns: Array
    output: Array


def freeze_heads(layer: Attention, branch: Branch, stream: Array) -> FrozenHeads:
    """Return an attention layer with the patterns and divisors of one stream (n, d_model)."""
    before = None if branch.before is None else FrozenNorm.on(branch.before, stream)
    x = stream if before is None else before.apply(stream)
    patterns = softmax(np.where(layer.mask(len(x)), layer.scores(x), -np.inf)).astype(x.dtype)
    output = layer.output(patterns, x)
    behind = None if branch.behind is None else FrozenNorm.on(branch.behind, output)
    W_V, b_V, W_O = layer.W_V, layer.b_V, layer.W_O
    left, bias = patterns, np.zeros_like(x) if layer.b_O is None else np.tile(layer.b_O, (len(x), 1))
    if before is not None:
        if before.bias is not None:
            b_V = before.bias @ W_V + (0 if b_V is None else b_V)  # kv [d] dh
        W_V = _centred(before.norm.weight[:, None] * W_V, 1, before)
    if layer.latent_norm is not None:
        left = left / layer.latent_norm.value_divisors(x)
    if behind is not None:
        W_O, left, bias = _centred(W_O, 2, behind) * behind.norm.weight, left / behind.divisors, behind.apply(bias)
        output = behind.apply(output)
    divisors = None if before is None else before.divisors[:, 0]
    operator = frozen_heads(W_V, W_O, b_V, None, left, divisors, context=None)
    operator = replace(operator, constant=operator.constant + bias)
    return FrozenHeads(layer, before, x, operator, patterns, output)


def _centred(weight: Array, axis: int, norm: FrozenNorm) -> Array:
    """Return the weight with its mean along an axis of features subtracted, for LayerNorm."""
    return weight - weight.mean(axis=axis, keepdims=True) if norm.norm.centred else weight
