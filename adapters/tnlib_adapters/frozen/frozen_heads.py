"""Attention between norms with patterns and divisors frozen, as an affine map of the residual stream.

With C the projection that centres the features (the identity for RMSNorm), w and b the weight and bias of a norm and D
its divisors, head h between a norm before (1) and a norm behind (2) is

    D2^-1 A^h D1^-1 (x) (C1 diag(w1) W_V^h W_O^h C2 diag(w2))^T

so it stays one Kronecker product. The constant has (b1 W_V + b_V) W_O for every row sum of A^h, then b_O and b2. The
operator multiplies norms into copies of the weights; contributions and adjoints apply them to the stream instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from tnlib import KroneckerTerms, LowRank
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.frozen_attention import FrozenAttention
from tnlib_adapters.reference.layers import Norm
from tnlib_adapters.reference.weights import Branch


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """LayerNorm or RMSNorm with the divisors of one sequence: x -> centre(x) / divisors * weight + bias."""

    norm: Norm
    divisors: Array  # (n, 1), one for every position

    @classmethod
    def on(cls, norm: Norm, x: Array) -> FrozenNorm:
        """Return a norm with its divisors for the stream x (n, d_model)."""
        return cls(norm, norm.divisors(norm.centre(x)))

    @classmethod
    def of(cls, norm: Norm | None, x: Array) -> tuple[FrozenNorm | None, Array]:
        """Return a norm with its divisors for the stream x (n, d_model), and its output; None and x for no norm."""
        if norm is None:
            return None, x
        centred = norm.centre(x)
        divisors = norm.divisors(centred)
        return cls(norm, divisors), norm.scaled(centred, divisors)

    def at(self, positions: slice) -> FrozenNorm:
        """Return the norm at some positions."""
        return FrozenNorm(self.norm, self.divisors[positions])

    @property
    def bias(self) -> Array | None:
        """(d_model,), what is added at every position; None for RMSNorm."""
        return self.norm.bias

    def linear(self, x: Array) -> Array:
        """Return the linear part for x (..., n, d_model)."""
        y: Array = self.norm.centre(x) / self.divisors * self.norm.weight
        return y

    def adjoint(self, y: Array) -> Array:
        """Return the adjoint of `linear` for y (..., n, d_model); centring is a symmetric projection."""
        x: Array = self.norm.centre(y * self.norm.weight) / self.divisors
        return x

    def apply(self, x: Array) -> Array:
        """Return the affine map of x (n, d_model): for the stream of the divisors, the output of the norm."""
        y = self.linear(x)
        return y if self.bias is None else y + self.bias


def pull_back(norm: FrozenNorm | None, y: Array) -> tuple[Array, Array]:
    """Return the adjoint of the linear part of a norm for y (..., n, d_model), and <y, bias>, (...).

    Without a norm these are y and zeros.
    """
    of_bias = np.zeros(y.shape[:-2])
    if norm is None:
        return y, of_bias
    return norm.adjoint(y), of_bias if norm.bias is None else of_bias + y.sum(axis=-2) @ norm.bias


@dataclass(frozen=True, eq=False)
class FrozenHeads:
    """An attention layer on one sequence."""

    layer: Attention  # reads the output of the norm `before`
    before: FrozenNorm | None  # norm of the stream, or None
    norm_behind: Norm | None  # norm of the output, without its divisors, or None
    input: Array  # (n, d_model), what the layer reads
    patterns: Array  # (heads, n, n), attention weights
    weighted_values: Array  # (heads, n, d_value): the values, biases included, summed with the attention weights

    remainder: ClassVar[None] = None  # that a feed-forward layer may have

    @property
    def behind(self) -> FrozenNorm | None:
        """Norm of the output, or None."""
        return self._behind_and_output[0]

    @property
    def output(self) -> Array:
        """(n, d_model): what the layer adds to the stream of the sequence, norms and biases included."""
        return self._behind_and_output[1]

    @cached_property
    def _behind_and_output(self) -> tuple[FrozenNorm | None, Array]:
        return FrozenNorm.of(self.norm_behind, self.layer.output_of_values(self.weighted_values))

    def at(self, position: int) -> FrozenHeads:
        """Return the layer with one query, for readouts of its output at one position."""
        here = slice(position, position + 1)
        return replace(self, patterns=self.patterns[:, here], weighted_values=self.weighted_values[:, here])

    @cached_property
    def weights(self) -> Array:
        """(heads, n, n): attention weights over the divisors of the values, which are 1 without latent vectors."""
        norm = self.layer.latent_norm
        return self.patterns if norm is None else self.patterns / norm.value_divisors(self.input)[:, 0]

    @cached_property
    def linear_values(self) -> Array:
        """(heads, n, d_value): `weighted_values` without the biases of the values and of the norm before."""
        bias = self._value_bias
        return self.weighted_values if bias is None else self.weighted_values - self._bias_values(bias)

    @cached_property
    def output_weights(self) -> Array:
        """(heads, d_value, d_model): W_O, followed by the centring and the weight of the norm behind."""
        norm = self.norm_behind
        return self.layer.W_O if norm is None else np.asarray(norm.centre(self.layer.W_O) * norm.weight)

    @cached_property
    def constant(self) -> Array:
        """(n, d_model): the output of all biases, those of the norms included."""
        bias, shape = self._value_bias, self.weighted_values.shape
        constant = self.layer.output_of_values(
            np.zeros(shape, self.input.dtype) if bias is None else self._bias_values(bias)
        )
        return constant if self.behind is None else self.behind.apply(constant)

    def values_of(self, x: Array) -> Array:
        """Return the weighted values of streams x (..., n, d_model) without biases, (..., heads, n, d_value)."""
        x = x if self.before is None else self.before.linear(x)
        values = self.layer.repeated(np.stack([x @ w for w in self.layer.W_V]))  # h ... n [d] dh
        return np.asarray(self.weights @ np.moveaxis(values, 0, -3))  # ... h n [n'] dh

    def linear(self, x: Array) -> Array:
        """Return the linear part of the output, (..., n, d_model), for x (..., n, d_model)."""
        values, W_O = self.values_of(x).swapaxes(-3, -2), self.output_weights  # ... n h dh
        written = values.reshape(*values.shape[:-2], -1) @ W_O.reshape(-1, W_O.shape[2])  # ... n [h dh] d
        return np.asarray(written if self.behind is None else written / self.behind.divisors)

    def apply(self, x: Array) -> Array:
        """Return linear(x) + constant for x (n, d_model)."""
        return self.linear(x) + self.constant

    @cached_property
    def operator(self) -> FrozenAttention:
        """The layer as an affine map of the stream, norms included."""
        left = self.weights if self.behind is None else self.weights / self.behind.divisors
        W_V, W_O = self.layer.W_V.swapaxes(1, 2), self.output_weights  # kv dh d, h dh d
        if self.before is not None:
            W_V = self.before.norm.centre(self.before.norm.weight * W_V)
            left = left / self.before.divisors[:, 0]
        right = [LowRank(out.T, W_V[self.layer.kv_head(h)]) for h, out in enumerate(W_O)]  # d [dh] d
        return FrozenAttention(KroneckerTerms(left, tuple(right)), self.constant)

    def contributions(self, readout: Array, values: Array) -> tuple[Array, Array]:
        """Return <readout, output> of every head, (..., heads), and of the biases, for readouts (..., n, d_model).

        `values` are those of `value_readouts`.
        """
        readout, of_biases = pull_back(self.behind, readout)
        if self.layer.b_O is not None:
            of_biases += readout.sum(axis=-2) @ self.layer.b_O
        if self._value_bias is not None:
            of_biases += (values * self._bias_values(self._value_bias)).sum(axis=(-3, -2, -1))
        return (values * self.linear_values).sum(axis=(-2, -1)), of_biases

    def value_readouts(self, readout: Array) -> Array:
        """Return readouts (..., n, d_model) pulled back to the weighted values, (..., heads, n, d_value)."""
        y = readout if self.behind is None else self.behind.adjoint(readout)
        heads, width, d = self.layer.W_O.shape
        values = y @ self.layer.W_O.reshape(-1, d).T  # ... n [d] (h dh)
        return np.asarray(values.reshape(*y.shape[:-1], heads, width).swapaxes(-3, -2))

    def pull_back(self, readout: Array) -> tuple[Array, Array]:
        """Return the adjoint of `linear` for readouts (..., n, d_model), and <readout, constant>, (...)."""
        values = self.value_readouts(readout)
        return self.adjoint(values), self.contributions(readout, values)[1]

    def adjoint(self, values: Array) -> Array:
        """Return the adjoint of the linear part, (..., n, d_model), from the `value_readouts` of all positions."""
        weighted = self.weights.transpose(0, 2, 1) @ values  # ... h n' [n] dh
        *lead, _, n, width = weighted.shape
        of_keys = weighted.reshape(*lead, self.layer.kv_heads, -1, n, width).sum(axis=-3)  # ... kv n dh
        x = np.zeros((*lead, n, self.layer.d_model), values.dtype)
        for k, weight in enumerate(self.layer.W_V):
            x += of_keys[..., k, :, :] @ weight.T  # ... n [dh] d
        return x if self.before is None else self.before.adjoint(x)

    def head_adjoint(self, head: int, values: Array) -> Array:
        """Return the adjoint of the linear part of one head, (..., n, d_model), from its `value_readouts`."""
        x = self.weights[head].T @ values @ self.layer.repeated(self.layer.W_V)[head].T  # ... n [dh] d
        return np.asarray(x if self.before is None else self.before.adjoint(x))

    @cached_property
    def _value_bias(self) -> Array | None:
        """(kv_heads, d_value): the values of the bias of the norm before, and b_V; None for none."""
        bias = None if self.before is None else self.before.bias
        if bias is None:
            return self.layer.b_V
        of_norm: Array = bias @ self.layer.W_V  # kv [d] dh
        return of_norm if self.layer.b_V is None else of_norm + self.layer.b_V

    def _bias_values(self, bias: Array) -> Array:
        """Return the weighted values of a bias (kv_heads, d_value), (heads, n, d_value)."""
        return np.asarray(self.weights.sum(axis=2, keepdims=True) * self.layer.repeated(bias)[:, None])


def freeze_heads(layer: Attention, branch: Branch, stream: Array) -> FrozenHeads:
    """Return an attention layer with the patterns and divisors of one stream (n, d_model)."""
    before, x = FrozenNorm.of(branch.before, stream)
    patterns = layer.patterns_of(layer.scores(x)).astype(x.dtype, copy=False)
    return FrozenHeads(layer, before, branch.behind, x, patterns, layer.weighted_values(patterns, x))
