"""Next-token targets and their cross-entropy for a final residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib_adapters.reference.layers import Unembedding, log_softmax, softmax
from tnlib_adapters.reference.model import check_mask
from tnlib_adapters.reference.weights import Weights


@dataclass(frozen=True, eq=False)
class Targets:
    """Tokens (b, n), a mask of target tokens, and the affine map to logits; there is no final norm."""

    tokens: Array
    counted: Array
    unembed: Unembedding

    @property
    def at(self) -> Array:
        """Positions whose next token is a target, (b, n)."""
        return np.roll(self.counted, -1, axis=1)

    def loss(self, stream: Array) -> float:
        """Return the mean cross-entropy in nats of a final stream (b, n, d)."""
        return self.loss_of_rows(stream[self.at])

    def loss_of_rows(self, rows: Array) -> float:
        """Return the mean cross-entropy of the target rows (t, d) alone."""
        log_p = log_softmax(self.unembed(rows))  # t vocab
        return float(-np.take_along_axis(log_p, self._actual, axis=1).mean())

    def slope(self, stream: Array) -> Array:
        """Return the gradient of the loss with respect to the final stream, (b, n, d)."""
        out = np.zeros_like(stream)
        out[self.at] = self.slope_of_rows(stream[self.at])
        return out

    def slope_of_rows(self, rows: Array) -> Array:
        """Return the gradient of the loss with respect to the target rows, (t, d)."""
        p = softmax(self.unembed(rows))  # t vocab
        p[np.arange(len(p)), self._actual[:, 0]] -= 1
        return np.asarray(p @ self.unembed.affine.weight.T / len(p))  # t [vocab] d

    @property
    def _actual(self) -> Array:
        return np.asarray(self.tokens[self.counted][:, None])  # t 1, in the order of `at`


def as_directions(function: str, directions: Array, d: int) -> Array:
    """Return directions in output space, (d,) or (directions, d), validated."""
    w = as_array(function, "directions", directions)
    if w.ndim not in (1, 2) or w.shape[-1] != d:
        raise ArgumentError(
            f"{function}: directions must have shape ({d},) or (directions, {d}), got {w.shape}; "
            "pass columns of the unembedding."
        )
    return w


def targets_of(weights: Weights, tokens: Array, mask: Array, function: str) -> Targets:
    """Return the targets for tokens and mask, validated."""
    if weights.unembed is None or weights.unembed.cap is not None:
        raise ArgumentError(
            f"{function}: model must have an unembedding that is affine, got a {weights.architecture}; "
            "use a language model without a cap on its logits."
        )
    tokens = weights.embedding.check(function, tokens, weights.context)
    return Targets(tokens, check_mask(function, mask, tokens), weights.unembed)
