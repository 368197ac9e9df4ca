"""W_Q and W_K with one basis of their inputs, shared by all heads; W_V and W_O as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tnlib_adapters.compression.methods.matrices import Matrices
from tnlib_adapters.compression.methods.tensor_stacks import TuckerStack
from tnlib_adapters.factors.attention_factors import Piece, rows_of_stack
from tnlib_adapters.factors.projections import Projections, Sizes

_STACKED = "qk"


class SharedBases:
    """The Tucker of the stack of W_Q and W_K, each scaled to norm 1, and two truncated matrices; biases as they are.

    Queries and keys are read by the scores alone and their weights see much the same directions, so that one basis
    serves both; with W_V in the stack too, or W_O in one of its own, less is kept for the same count of numbers. The
    stack counts once, as a matrix does, by the mean of its two squared relative errors.
    """

    def __init__(self, projections: Projections, sizes: Sizes) -> None:
        self.fixed = sum(bias.size for bias in projections.biases.values())
        self._norms = {name: float(np.linalg.norm(projections.weights[name])) or 1.0 for name in _STACKED}
        scaled = {name: projections.weights[name] / norm for name, norm in self._norms.items()}
        weights = Projections({**projections.weights, **scaled}, {})
        self._stack, self._matrices = TuckerStack(weights, sizes, _STACKED), Matrices(weights, sizes, "vo")
        self.curves = [*self._stack.curves, *self._matrices.curves]

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors at one option of the stack, of W_V and of W_O."""
        (stacked,) = self._stack.pieces(choice[:1])
        part = "stack" if stacked.kind == "stack" else "factor0"
        rows = stacked.arrays[part].copy()
        for name, own in rows_of_stack(len(rows), _STACKED).items():
            rows[own] *= self._norms[name]
        return [replace(stacked, arrays={**stacked.arrays, part: rows}), *self._matrices.pieces(choice[1:])]
