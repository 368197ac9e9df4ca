"""Second moments of the inputs of attention projections, and of gradients at their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array


@dataclass(frozen=True)
class Inputs:
    """Sums over tokens of outer products of the inputs of one layer's projections.

    Parameters
    ----------
    x
        (d_model + 1,) * 2, of [x, 1] with the common input x of queries, keys and values.
    y
        (heads * d_head,) * 2, of the input of the output projection.
    """

    x: Array
    y: Array

    def reads(self, name: str, rows: int) -> Array:
        """Return the moments of the input of a projection with `rows` rows: a bias is one more row, with input 1."""
        moments = self.y if name == "o" else self.x
        return moments[:rows, :rows]


@dataclass(frozen=True)
class Moments(Inputs):
    """Input moments, and for "q", "k", "v" and "o" in `slopes` the moments of the gradient at the output."""

    slopes: Mapping[str, Array]


def second_moments(x: Array) -> Array:
    """Return the sum of x x^T over all axes but the last."""
    # numpy recognises a.T @ a and computes half of the symmetric product
    flat = x.reshape(-1, x.shape[-1])
    moments: Array = flat.T @ flat  # [tokens]
    return moments


def triangular_root(moments: Array) -> tuple[Array, Array]:
    """Return R with R^T R = C, and its inverse, by Cholesky: ten times faster than by eigenvalues for large matrices.

    A singular C is shifted by a multiple of the identity of the size of its rounding errors.
    """
    size = float(np.trace(moments)) / len(moments)
    if size <= 0:
        return np.eye(len(moments)), np.eye(len(moments))
    for raised in (1e-12, 1e-10, 1e-8, 1e-6, 1e-4):
        try:
            lower = np.linalg.cholesky(moments / size + raised * np.eye(len(moments)))
        except np.linalg.LinAlgError:
            continue
        return lower.T, np.linalg.inv(lower).T
    raise ArithmeticError(f"triangular_root: moments of size {len(moments)} have eigenvalues far below zero")
