"""Heads of one attention layer, each of whose queries, keys and values reads a stream of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.softmax import library_of, like
from tnlib_adapters.reference.layers import Norm, normed
from tnlib_adapters.reference.weights import Branch

SIDES = ("Q", "K", "V")


@dataclass(frozen=True, eq=False)
class GatedHeads:
    """An attention layer with its norms, in which every query head has its own keys and values."""

    layer: Attention
    before: Norm | None
    behind: Norm | None

    @classmethod
    def of(cls, branch: Branch) -> GatedHeads | None:
        """Return the heads of an attention layer, None for another layer."""
        layer = branch.layer
        if not isinstance(layer, Attention):
            return None
        return cls(layer.of_heads(range(layer.n_heads)), branch.before, branch.behind)

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return self.layer.n_heads

    @functools.cached_property
    def single(self) -> tuple[GatedHeads, ...]:
        """Every head as a layer."""
        return tuple(GatedHeads(self.layer.of_heads([h]), self.before, self.behind) for h in range(self.n_heads))

    @property
    def has_bias(self) -> bool:
        """True if the layer writes a constant beside its heads."""
        return self.layer.b_O is not None or (self.behind is not None and self.behind.bias is not None)

    def outputs(self, reads: Array) -> Array:
        """Return what the heads write before a norm behind them, (h, b, n, d_model).

        `reads` (3, h, b, n, d_model), or (3, 1, b, n, d_model), are the streams that queries, keys and values read,
        before any norm.
        """
        layer, x = self.layer, normed(self.before, reads)
        positions = np.arange(x.shape[-2])
        q, k, v = layer.queries(x[0], positions), layer.keys(x[1], positions), layer.values(x[2])
        return layer.head_outputs(layer.patterns_of(layer.scores_of(q, k, positions[:, None] - positions)), v)

    def written(self, outputs: Array) -> Array:
        """Return the outputs of all heads behind the norm, then that of the biases, (writers, b, n, d_model)."""
        if not self.has_bias and self.behind is None:
            return outputs
        bias = 0.0 * outputs[:1]
        if self.layer.b_O is not None:
            bias = bias + like(self.layer.b_O, outputs)
        writers: Array = library_of(outputs).concat([outputs, bias])
        if self.behind is None:
            return writers
        norm = self.behind
        centred = norm.centre(writers)
        y = centred / norm.divisors(centred.sum(0)) * like(norm.weight, outputs)
        if norm.bias is not None:
            y[-1] += like(norm.bias, outputs)
        return y if self.has_bias else y[:-1]
