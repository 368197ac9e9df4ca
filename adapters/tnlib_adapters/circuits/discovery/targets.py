"""Cross-entropy and KL divergence of the predictions at some positions, with gradients of the final stream."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.reference.adjoints import norm_adjoint
from tnlib_adapters.reference.layers import Norm, Unembedding, log_softmax
from tnlib_adapters.reference.model import check_mask
from tnlib_adapters.reference.weights import Weights


@dataclass(frozen=True, eq=False)
class Targets:
    """Tokens (b, n), a mask of target tokens, and the map from the final stream to logits.

    Without `reference` the loss is the mean cross-entropy of the targets, in nats. With `reference` (t, vocab),
    log-probabilities, it is the mean KL divergence of the predictions from them.
    """

    tokens: Array
    counted: Array
    unembed: Unembedding
    final_norm: Norm | None = None
    reference: Array | None = None

    @property
    def at(self) -> Array:
        """Positions whose next token is a target, (b, n)."""
        return np.roll(self.counted, -1, axis=1)

    def loss(self, stream: Array) -> float:
        """Return the loss of a final stream (b, n, d)."""
        return self.loss_of_rows(stream[self.at])

    def loss_of_rows(self, rows: Array) -> float:
        """Return the loss of the target rows (t, d) alone."""
        log_p = self.log_probabilities(rows)
        if self.reference is None:
            return float(-np.take_along_axis(log_p, self._actual, axis=1).mean())
        return float((np.exp(self.reference) * (self.reference - log_p)).sum() / len(log_p))

    def losses_of_rows(self, rows: Array, actual: Array) -> Array:
        """Return the cross-entropy of tokens (t,) as predicted by rows (t, d) of the final stream, (t,)."""
        hidden = rows if self.final_norm is None else self.final_norm(rows)
        return self.unembed.log_partitions(hidden) - self.unembed.logits_of(hidden, actual)

    def log_probabilities(self, rows: Array) -> Array:
        """Return the log-probabilities of the predictions of target rows (t, d), (t, vocab)."""
        return log_softmax(self.unembed(rows if self.final_norm is None else self.final_norm(rows)))

    def compared_with(self, stream: Array) -> Targets:
        """Return the same targets with the KL divergence from the predictions of a final stream (b, n, d)."""
        return replace(self, reference=self.log_probabilities(stream[self.at]))

    def slope(self, stream: Array) -> Array:
        """Return the gradient of the loss with respect to the final stream, (b, n, d)."""
        out = np.zeros_like(stream)
        out[self.at] = self.slope_of_rows(stream[self.at])
        return out

    def slope_of_rows(self, rows: Array) -> Array:
        """Return the gradient of the loss with respect to the target rows, (t, d)."""
        affine, cap = self.unembed.affine, self.unembed.cap
        logits = self.unembed(rows if self.final_norm is None else self.final_norm(rows))
        grad = np.exp(log_softmax(logits))  # t vocab
        if self.reference is None:
            grad[np.arange(len(grad)), self._actual[:, 0]] -= 1
        else:
            grad -= np.exp(self.reference)
        if cap is not None:
            grad *= 1 - (logits / cap) ** 2
        of_hidden = np.asarray(grad @ affine.weight.T / len(grad))  # t [vocab] d
        return of_hidden if self.final_norm is None else norm_adjoint(self.final_norm, rows, of_hidden)

    @property
    def _actual(self) -> Array:
        return np.asarray(self.tokens[self.counted][:, None])  # t 1, in the order of `at`


def targets_of(weights: Weights, tokens: Array, mask: Array, function: str) -> Targets:
    """Return the targets for tokens and mask, validated."""
    if weights.unembed is None:
        raise ArgumentError(
            f"{function}: model must have an unembedding, got a {weights.architecture}; use a language model."
        )
    tokens = weights.embedding.check(function, tokens, weights.context)
    return Targets(tokens, check_mask(function, mask, tokens), weights.unembed, weights.final_norm)
