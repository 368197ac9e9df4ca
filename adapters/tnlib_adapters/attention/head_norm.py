"""Norm of queries and keys per head (QK norm)."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, to_numpy


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of each head's queries and keys (QK norm); scores are then not bilinear in the stream.

    Parameters
    ----------
    query, key
        (d_head,), weights of the norm.
    eps
        Added to the mean square.
    """

    query: Array
    key: Array
    eps: float

    def __post_init__(self) -> None:
        for name in ("query", "key"):
            object.__setattr__(self, name, as_array("HeadNorm", name, getattr(self, name), ndim=1))
        if self.query.shape != self.key.shape:
            raise ArgumentError(
                f"HeadNorm: query and key must have one shape, got {self.query.shape} and {self.key.shape}; "
                "both are as wide as a head."
            )
        if not isinstance(self.eps, Real) or not self.eps >= 0:
            raise ArgumentError(
                f"HeadNorm: eps must be a number from 0 on, got {self.eps!r:.80}; pass for example 1e-6."
            )

    def queries(self, q: Array) -> Array:
        """Normalise queries (..., d_head) over the last axis."""
        return self._normed("queries", q, self.query)

    def keys(self, k: Array) -> Array:
        """Normalise keys (..., d_head) over the last axis."""
        return self._normed("keys", k, self.key)

    def _normed(self, method: str, x: Array, weight: Array) -> Array:
        x = to_numpy(f"HeadNorm.{method}", "x", x)
        if x.shape[-1:] != weight.shape or x.dtype.kind not in "fc":
            raise ArgumentError(
                f"HeadNorm.{method}: x must have shape (..., {len(weight)}), got {x.dtype} of shape {x.shape}; "
                "pass one head, or a leg of heads before its columns."
            )
        y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight
        return y
