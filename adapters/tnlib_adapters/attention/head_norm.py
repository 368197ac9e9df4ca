"""The norm that some models put on every head's queries and keys before they meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of each head's queries and keys; scores are then no bilinear form of the stream.

    Parameters
    ----------
    query, key
        (d_head,), what the normalised columns are multiplied by.
    eps
        Added to the mean square.
    """

    query: Array
    key: Array
    eps: float

    def queries(self, q: Array) -> Array:
        """Normalise the last leg of queries (..., d_head)."""
        return self._normed(q, self.query)

    def keys(self, k: Array) -> Array:
        """Normalise the last leg of keys (..., d_head)."""
        return self._normed(k, self.key)

    def _normed(self, x: Array, weight: Array) -> Array:
        y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight
        return y
