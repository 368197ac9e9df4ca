"""Norms of queries and keys: per head (QK norm), and of the latent vectors from which a layer makes them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, to_numpy
from tnlib_adapters.attention.softmax import like, namespace_of


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of each head's queries and keys (QK norm); scores are then not bilinear in the stream.

    Parameters
    ----------
    query, key
        (d_head,), weights of the norm.
    eps
        Added to the mean square.

    References
    ----------
    B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization" (2019); A. Henry et al., "Query-Key Normalization for
    Transformers" (2020), for QK norm.

    Examples
    --------
    >>> import numpy as np
    >>> norm = HeadNorm(query=np.ones(2), key=np.array([1.0, 2.0]), eps=0.0)
    >>> x = np.array([1.0, 7.0])  # root mean square 5
    >>> norm.queries(x), norm.keys(x)
    (array([0.2, 1.4]), array([0.2, 2.8]))
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
        return self._checked("queries", q, self.query)

    def keys(self, k: Array) -> Array:
        """Normalise keys (..., d_head) over the last axis."""
        return self._checked("keys", k, self.key)

    def divided(self, x: Array, weight: Array, total: Array | None = None) -> Array:
        """Return x (..., d_head) times weight over the root mean square of x, or of `total`, without checks."""
        total = x if total is None else total
        y: Array = x / ((total * total).mean(-1, keepdims=True) + self.eps) ** 0.5 * like(weight, x)
        return y

    def _checked(self, method: str, x: Array, weight: Array) -> Array:
        x = to_numpy(f"HeadNorm.{method}", "x", x)
        if x.shape[-1:] != weight.shape or x.dtype.kind not in "fc":
            raise ArgumentError(
                f"HeadNorm.{method}: x must have shape (..., {len(weight)}), got {x.dtype} of shape {x.shape}; "
                "pass one head, or a leg of heads before its columns."
            )
        return self.divided(x, weight)


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

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model" (2024).

    Examples
    --------
    The latent vector of this stream is [1, 7], of root mean square 5:

    >>> import numpy as np
    >>> norm = LatentNorm(query=None, key_value=np.eye(4)[:, :2], eps=0.0, n_rotated=1)
    >>> x = np.array([[1.0, 7.0, 3.0, 3.0]])
    >>> norm.value_divisors(x), norm.keys(np.array([[10.0, 10.0, 20.0]]), x)
    (array([[5.]]), array([[10.,  2.,  4.]]))
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
        """Return queries (..., n, d_head) of a stream x (..., n, d_model) divided."""
        return q if self.query is None else q / self._divisors(x, self.query)

    def keys(self, k: Array, x: Array) -> Array:
        """Return keys (..., n, d_head) of a stream x (..., n, d_model) divided, but for the rotated columns."""
        divided = k[..., self.n_rotated :] / self.value_divisors(x)
        keys: Array = namespace_of(k).concat([k[..., : self.n_rotated], divided], axis=-1)
        return keys

    def value_divisors(self, x: Array) -> Array:
        """Return the divisors (..., n, 1) of the values of x (..., n, d_model)."""
        return self._divisors(x, self.key_value)

    def _divisors(self, x: Array, down: Array) -> Array:
        latent = x @ like(down, x)  # ... n [d] r
        roots: Array = ((latent * latent).mean(-1, keepdims=True) + self.eps) ** 0.5
        return roots
