"""One attention layer with frozen patterns: an affine map of the sequence, linear part a sum of Kronecker products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError, KroneckerTerms, LowRank
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.drawing.diagram import Diagram
from tnlib_adapters.attention.frozen.diagrams import of_frozen


@dataclass(frozen=True, eq=False, repr=False)
class FrozenAttention:
    """A layer with frozen patterns: the affine map x -> terms x + constant; unpacks to the two.

    Addition adds outputs, and `second @ first` is composition. The product of two heads is a virtual head,
    (A2 (x) B2)(A1 (x) B1) = A2 A1 (x) B2 B1, with the smaller of the two ranks.

    Parameters
    ----------
    terms
        sum_h A^h (x) (W_V^h W_O^h)^T on arrays (positions, d_model).
    constant
        (positions, d_model): the contribution of the value and output biases.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> uniform = layer.frozen(np.tril(np.ones((4, 10, 10))) / np.arange(1, 11)[:, None])
    >>> uniform
    FrozenAttention(4 terms on 10 positions x 64 features, and a constant)
    >>> (uniform @ uniform).terms.ranks
    (16,)
    """

    terms: KroneckerTerms
    constant: Array

    __array_ufunc__ = None  # numpy must defer to __rmatmul__

    def __repr__(self) -> str:
        n, d = self.constant.shape
        return f"FrozenAttention({self.terms.ranks[0]} terms on {n} positions x {d} features, and a constant)"

    def __iter__(self) -> Iterator[Any]:
        return iter((self.terms, self.constant))

    def apply(self, x: Array) -> Array:
        """Return the layer's output (positions, d_model) for x (positions, d_model)."""
        return self.terms.apply(x) + self.constant

    def diagram(self) -> Diagram:
        """Return the diagram for `tnlib.draw`."""
        return of_frozen(self.terms)

    def __add__(self, other: Any) -> FrozenAttention:
        if not isinstance(other, FrozenAttention):
            return NotImplemented
        return FrozenAttention(self.terms + other.terms, self.constant + other.constant)

    def __matmul__(self, other: Any) -> FrozenAttention:
        if not isinstance(other, FrozenAttention):
            return NotImplemented
        return FrozenAttention(self.terms @ other.terms, self.apply(other.constant))


def frozen_heads(
    W_V: Array,
    W_O: Array,
    b_V: Array | None,
    b_O: Array | None,
    patterns: Array,
    divisors: Array | None,
    *,
    context: int | None,
) -> FrozenAttention:
    """Return the result of `Attention.frozen` for weights in the layout of `Attention`."""
    heads, _, d_model = W_O.shape
    patterns = as_patterns("frozen", patterns, heads)
    if context is not None and max(patterns.shape[1:]) > context:
        raise ArgumentError(
            f"Attention.frozen: patterns must be of at most {context} positions, as many as the model was made for, "
            f"got {patterns.shape}; shorten them."
        )
    group, dtype = heads // len(W_V), np.result_type(patterns, W_V, W_O)
    values, out = (w.astype(dtype, copy=False) for w in (W_V, W_O))  # dtype of the products of heads
    right = [LowRank(out[h].T, values[h // group].T) for h in range(heads)]  # d [dh] d
    constant = np.zeros((patterns.shape[1], d_model), dtype)
    if b_V is not None:
        for a, b, w in zip(patterns, np.repeat(b_V, group, axis=0), out, strict=True):
            constant += np.outer(a.sum(axis=1), b.astype(dtype) @ w)  # n [n'], [dh] d
    if b_O is not None:
        constant += b_O
    weights = patterns if divisors is None else patterns / _as_divisors(divisors, patterns.shape[2])
    return FrozenAttention(KroneckerTerms(weights, tuple(right)), constant)


def as_patterns(method: str, patterns: Array, heads: int) -> Array:
    """Return attention weights (heads, n, n'), validated."""
    patterns = as_array(f"Attention.{method}", "patterns", patterns)
    if patterns.ndim != 3 or len(patterns) != heads:
        raise ArgumentError(
            f"Attention.{method}: patterns must have shape (heads, n, n') with {heads} heads, "
            f"got {patterns.shape}; pass one matrix per head."
        )
    return patterns


def _as_divisors(divisors: Array, n: int) -> Array:
    a = as_array("Attention.frozen", "divisors", divisors)
    if a.shape != (n,) or a.dtype.kind == "c" or not (a > 0).all():
        raise ArgumentError(
            f"Attention.frozen: divisors must be {n} positive numbers, one for every position that is attended to, got "
            f"{a.dtype} of shape {a.shape}, the smallest {a.real.min():.3g}; norm_divisors gives them."
        )
    return a
