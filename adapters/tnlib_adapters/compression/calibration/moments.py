"""Second moments of what the attention of a layer reads, and of gradients at what it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array


@dataclass(frozen=True)
class Inputs:
    """Sums over tokens of what one layer's projections read.

    Parameters
    ----------
    x
        (d_model + 1,) * 2, of [x, 1] with x what queries, keys and values are made of.
    y
        (heads * d_head,) * 2, of what the output projection reads.
    """

    x: Array
    y: Array

    def reads(self, name: str, rows: int) -> Array:
        """Return those of what the `rows` rows of a projection multiply: its bias is a row that reads 1."""
        whole = self.y if name == "o" else self.x
        return whole[:rows, :rows]


@dataclass(frozen=True)
class Moments(Inputs):
    """The same, and for "q", "k", "v" and "o" `slopes`: those of the gradient at what the projection writes."""

    slopes: Mapping[str, Array]


def second_moments(x: Array) -> Array:
    """Return the sum of x x^T over all but the last leg."""
    # numpy sees that both factors are one array, and computes half of a symmetric product
    flat = x.reshape(-1, x.shape[-1])
    found: Array = flat.T @ flat  # [tokens]
    return found


def triangular_root(moments: Array) -> tuple[Array, Array]:
    """Return R with R^T R = C, and its inverse: for large matrices in a tenth of the time that eigenvalues take.

    A C that is singular is raised, in all directions, by as little as its rounding errors ask for.
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
