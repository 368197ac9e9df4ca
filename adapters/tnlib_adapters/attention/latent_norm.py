"""Norm of the latent vectors from which a layer makes its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count


@dataclass(frozen=True, eq=False)
class LatentNorm:
    """RMSNorm of low-rank latent vectors x @ down; scores and values are then not linear in x.

    The up maps, with the weights of the norms, are part of W_Q, W_K and W_V: only the divisions are left.

    Parameters
    ----------
    query
        (d_model, rank), down map of the queries; None if queries are linear in x.
    key_value
        (d_model, rank), down map of keys and values.
    eps
        Added to the mean square.
    n_rotated
        Number of columns at the start of every key that do not come from the latent vector, and are not divided.
    """

    query: Array | None
    key_value: Array
    eps: float
    n_rotated: int

    def __post_init__(self) -> None:
        for name in ("query", "key_value"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else as_array("LatentNorm", name, value, ndim=2))
        if self.query is not None and len(self.query) != len(self.key_value):
            raise ArgumentError(
                f"LatentNorm: query and key_value must read one stream, got {self.query.shape} and "
                f"{self.key_value.shape}; pass (d_model, rank)."
            )
        object.__setattr__(self, "n_rotated", as_count("LatentNorm", "n_rotated", self.n_rotated))

    def queries(self, q: Array, x: Array) -> Array:
        """Return queries (heads, n, d_head) of x (n, d_model) divided."""
        return q if self.query is None else q / self._divisors(x, self.query)[:, None]

    def keys(self, k: Array, x: Array) -> Array:
        """Return keys (heads, n, d_head) of x (n, d_model) divided, but for the rotated columns."""
        divided = k[..., self.n_rotated :] / self.value_divisors(x)[:, None]
        return np.concatenate([k[..., : self.n_rotated], divided], axis=-1)

    def value_divisors(self, x: Array) -> Array:
        """Return the divisors (n,) of the values of x (n, d_model)."""
        return self._divisors(x, self.key_value)

    def _divisors(self, x: Array, down: Array) -> Array:
        roots: Array = np.sqrt(np.square(x @ down).mean(axis=-1) + self.eps)  # n [d] r
        return roots
