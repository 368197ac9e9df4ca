"""Layers other than attention: affine maps, norms, activations, feed-forward layers, experts, the unembedding.

Where gradients are needed, the stream may be a tensor of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Routing
from tnlib_adapters.attention.softmax import like, matmul, namespace_of, soft_capped, softmax


@dataclass(frozen=True)
class Activation:
    """A function f of one variable with f(0) = 0, applied elementwise."""

    secant: Callable[[Array], Array]  # f(x) / x, the slope of the line from the origin; at 0 its limit from the right
    derivative: Callable[[Array], Array]  # f'(x)

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


def _scaled_silu(c: float) -> Activation:
    """Return x sigmoid(c x)."""

    def _derivative(x: Array) -> Array:
        s = sigmoid(c * x)
        y: Array = s + c * x * s * (1 - s)
        return y

    return Activation(lambda x: sigmoid(c * x), _derivative)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow.

    >>> sigmoid(np.array([0.0, -1000.0]))
    array([0.5, 0. ])
    """
    y: Array = namespace_of(x).tanh(0.5 * x)
    if not isinstance(y, np.ndarray):
        return 0.5 * (1 + y)
    y += 1  # in place, as in Activation
    y *= 0.5
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
    "relu": Activation(lambda x: (x >= 0).astype(x.dtype), lambda x: (x > 0).astype(x.dtype)),
    "silu": _SILU,
    "swish": _SILU,
}


_BLOCK = 4096  # tokens whose logits are in memory at a time


def rows_product(x: Array, weight: Array) -> Array:
    """Return x @ weight (..., out) for x (..., in), in Fortran order.

    BLAS is up to a quarter faster in this order for the few rows of a sequence: it keeps a packed block of them in the
    cache and packs every block of the weight just before use.
    """
    if not isinstance(x, np.ndarray):
        return matmul(x, like(weight, x))
    rows: Array = np.matmul(x.reshape(-1, x.shape[-1]), weight, order="F")  # (...) [in] out
    return rows.reshape(*x.shape[:-1], weight.shape[1])


@dataclass(frozen=True)
class Affine:
    """An affine map of rows; `weight` (in, out), `bias` (out,) or None."""

    weight: Array
    bias: Array | None

    def __call__(self, x: Array) -> Array:
        """Return x @ weight + bias, (..., out) for x (..., in)."""
        y = rows_product(x, self.weight)  # ... [in] out
        if self.bias is not None:
            y += like(self.bias, y)
        return y


@dataclass(frozen=True)
class Norm:
    """LayerNorm if `centred`, else RMSNorm; `weight` (d_model,), `bias` (d_model,) or None."""

    weight: Array
    bias: Array | None
    eps: float
    centred: bool = True

    def __call__(self, x: Array) -> Array:
        """Return the rows normalised to mean square 1, after centring for LayerNorm, times weight plus bias."""
        centred = self.centre(x)
        return self.scaled(centred, self.divisors(centred))

    def scaled(self, centred: Array, divisors: Array) -> Array:
        """Return centred rows (..., d_model) over their divisors (..., 1), times weight plus bias."""
        # The gradient of a product in torch needs two arrays of the size of x less than that of a quotient.
        y: Array = centred / divisors if isinstance(centred, np.ndarray) else centred * (1.0 / divisors)
        y *= like(self.weight, y)
        if self.bias is not None:
            y += like(self.bias, y)
        return y

    def of_sum(self, parts: Mapping[str, Array], bias: str) -> dict[str, Array]:
        """Return the norm of a sum as a sum: its parts with the divisors of the sum, and the part `bias`."""
        divisors = self.divisors(self.centre(np.asarray(sum(parts.values()))))
        terms = {name: self.centre(x) / divisors * self.weight for name, x in parts.items()}
        if self.bias is not None:
            terms[bias] = np.broadcast_to(self.bias, (*divisors.shape[:-1], len(self.bias)))
        return terms

    def centre(self, x: Array) -> Array:
        """Return the rows minus their means for LayerNorm, unchanged for RMSNorm."""
        return x - _row_means(x) if self.centred else x

    def divisors(self, centred: Array) -> Array:
        """Return the divisors (..., 1) of centred rows (..., d_model)."""
        if isinstance(centred, np.ndarray):
            mean_square = _row_means(centred * centred)
        else:  # whose gradient takes one array of the size of x, and that of the squares four
            lengths = namespace_of(centred).linalg.vector_norm(centred, axis=-1, keepdims=True)
            mean_square = lengths * lengths / centred.shape[-1]
        roots: Array = (mean_square + self.eps) ** 0.5
        return roots


def _row_means(x: Array) -> Array:
    """Return the means (..., 1) over the last axis, in double precision: numpy adds one by one in Fortran order."""
    if not isinstance(x, np.ndarray):
        return x.mean(-1, keepdims=True)
    means: Array = x.mean(-1, keepdims=True, dtype=np.float64).astype(x.dtype, copy=False)
    return means


def normed(norm: Norm | None, x: Array) -> Array:
    """Return the output of a norm, or x without one."""
    return x if norm is None else norm(x)


@dataclass(frozen=True)
class FeedForward:
    """Feed-forward layer: up projection, activation, down projection, optionally with a gate."""

    up: Affine
    down: Affine
    activation: Activation
    gate: Affine | None = None

    def __call__(self, x: Array) -> Array:
        """Return down(activation(up(x))), or down(activation(gate(x)) * up(x))."""
        return self.down(self.hidden(x))

    def hidden(self, x: Array) -> Array:
        """Return the input of the down projection, (..., d_ff) for x (..., d_model)."""
        wide = self.up(x)
        if self.gate is None:
            return self.activation(wide)
        gated = self.activation(self.gate(x))
        return np.multiply(gated, wide, out=gated) if isinstance(gated, np.ndarray) else gated * wide


@dataclass(frozen=True)
class MixtureOfExperts:
    """Mixture of experts: the weighted sum of `n_chosen` experts, plus a shared one that reads all positions.

    `correction` (experts,) is added to the scores for the choice of experts, not to their weights.
    """

    router: Affine
    experts: tuple[FeedForward, ...]
    n_chosen: int
    routing: Routing
    correction: Array | None = None
    shared: FeedForward | None = None

    def __call__(self, x: Array) -> Array:
        """Return the weighted sum of the outputs of the chosen experts, plus that of the shared one."""
        weights, out = self.weights(x), 0.0 * x if self.shared is None else self.shared(x)
        for k, expert in enumerate(self.experts):
            chosen = weights[..., k] > 0
            out[chosen] += weights[chosen, k, None] * expert(x[chosen])  # position d_model
        return out

    def weights(self, x: Array) -> Array:
        """Return the weight of every expert at every position, (..., experts), 0 unless it is chosen."""
        logits = self.router(x)
        scores = softmax(logits) if self.routing.scores == "softmax" else sigmoid(logits)
        values = scores if isinstance(scores, np.ndarray) else scores.detach().numpy()  # the choice has no gradient
        ranked = self._of_chosen_groups(values if self.correction is None else values + self.correction)
        kept: Array = namespace_of(scores).where(like(_is_largest(ranked, self.n_chosen), scores), scores, 0.0)
        kept = kept / kept.sum(-1, keepdims=True) if self.routing.normalised else kept
        return self.routing.factor * kept

    def _of_chosen_groups(self, ranked: Array) -> Array:
        """Return the scores (..., experts) with those outside the chosen groups at -inf."""
        by_group = ranked.reshape(*ranked.shape[:-1], self.routing.n_groups, -1)
        of_groups = np.sort(by_group, axis=-1)[..., -self.routing.n_best :].sum(-1)  # ... group
        chosen = _is_largest(of_groups, self.routing.n_chosen_groups)
        kept: Array = np.where(chosen[..., None], by_group, -np.inf)
        return kept.reshape(ranked.shape)


def _is_largest(x: Array, n: int) -> Array:
    """Return True at the `n` largest entries along the last axis."""
    largest = np.argsort(x, axis=-1, kind="stable")[..., -n:]
    marked = np.zeros(x.shape, bool)
    np.put_along_axis(marked, largest, True, -1)
    return marked


@dataclass(frozen=True)
class Unembedding:
    """Map from hidden states to logits, with an optional soft cap."""

    affine: Affine
    cap: float | None

    def __call__(self, x: Array) -> Array:
        """Return logits (..., vocab) of hidden states (..., d_model)."""
        return self._capped(self.affine(x))

    def logits_of(self, x: Array, tokens: Array) -> Array:
        """Return the logit of one token (t,) for each of the hidden states (t, d_model), (t,)."""
        logits = np.einsum("td,dt->t", x, self.affine.weight[:, tokens])
        return self._capped(logits if self.affine.bias is None else logits + self.affine.bias[tokens])

    def log_partitions(self, x: Array) -> Array:
        """Return the logarithm of the sum of exp(logits) over the vocabulary, (t,), of hidden states (t, d_model).

        Summed in double precision, because numpy adds one by one in the Fortran order of the logits. Blocks of the
        vocabulary bound the memory.
        """
        weight, bias = self.affine.weight, self.affine.bias
        largest, sums = np.full((len(x), 1), -np.inf, x.dtype), np.zeros((len(x), 1))
        for start in range(0, weight.shape[1], _BLOCK):
            block = slice(start, start + _BLOCK)
            logits = self._capped(Affine(weight[:, block], None if bias is None else bias[block])(x))  # t [d] token
            new = np.maximum(largest, logits.max(axis=1, keepdims=True))
            logits -= new
            sums *= np.exp(largest - new)
            sums += np.exp(logits, out=logits).sum(axis=1, keepdims=True, dtype=np.float64)
            largest = new
        return np.asarray((largest + np.log(sums))[:, 0], x.dtype)

    def cross_entropies(self, x: Array, tokens: Array) -> Array:
        """Return the cross-entropy of one token (t,) for each of the hidden states (t, d_model), (t,), in nats."""
        return self.log_partitions(x) - self.logits_of(x, tokens)

    def _capped(self, logits: Array) -> Array:
        return soft_capped(logits, self.cap)
