"""Recursion over layers for streams through frozen layers, graded by the number of heads on the path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, KroneckerTerms, LowRank
from tnlib._typing import Array
from tnlib._validate import as_array, as_count
from tnlib.linalg.threads import parallel_matmul
from tnlib_adapters.attention.frozen.residual_product import Head
from tnlib_adapters.attention.frozen.stack import FrozenStack


@dataclass(frozen=True, eq=False)
class Layer:
    """The heads of a layer concatenated: input weights (d, R), output weights (R, d), and the columns of each head."""

    patterns: Array
    into: Array
    out: Array
    own: tuple[slice, ...]
    constant: Array

    @classmethod
    def of(cls, terms: KroneckerTerms, constant: Array) -> Layer:
        """Return the concatenated heads of one layer; right matrices of the terms act on columns."""
        pairs = [(b.right.T, b.left.T) if isinstance(b, LowRank) else (b.T, np.eye(len(b))) for b in terms.right]
        ends = np.cumsum([0] + [p.shape[1] for p, _ in pairs])
        own = tuple(slice(a, b) for a, b in pairwise(ends))
        into, out = np.concatenate([p for p, _ in pairs], axis=1), np.concatenate([q for _, q in pairs])
        return cls(terms.left, into, out, own, constant)

    def read(self, s: Array) -> list[Array]:
        """Return per head A s W_V, (..., n, r), of streams (..., n, d)."""
        v = _times(s, self.into)  # ... n [d] R
        return [a @ v[..., columns] for a, columns in zip(self.patterns, self.own, strict=True)]  # ... n [n'] r

    def write(self, read: Sequence[Array]) -> Array:
        """Return the sum of the head outputs, (..., n, d)."""
        return _times(np.concatenate(read, axis=-1), self.out)  # ... n [R] d

    def ask(self, reading: Array) -> list[Array]:
        """Return per head R W_O^T, (..., n, r), for readouts R (..., n, d)."""
        projected = _times(reading, self.out.T)  # ... n [d] R
        return [projected[..., columns] for columns in self.own]

    def ask_back(self, asked: Sequence[Array]) -> Array:
        """Return the readouts pulled back to the input stream of the heads, (..., n, d)."""
        readouts = [a.T @ readout for a, readout in zip(self.patterns, asked, strict=True)]  # ... n' [n] r
        return _times(np.concatenate(readouts, axis=-1), self.into.T)  # ... n' [R] d


def _times(x: Array, w: Array) -> Array:
    """Return x @ w for x (..., n, d) as one product, threaded by `parallel_matmul`."""
    return parallel_matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[1])  # (... n) [d] r


def forward_by_order(layers: Sequence[Layer], x: Array, m: int) -> Iterator[Array]:
    """Yield the streams (order, n, d) before every layer and after the last."""
    s = x[None]
    for layer in layers:
        yield s
        s = longer(s, layer.write(layer.read(s)), m)
        s[0] += layer.constant
    yield s


def longer(s: Array, through: Array, m: int) -> Array:
    """Return s plus the contribution of one more head, (..., order, n, d); the last order is m + 1 or more."""
    *lead, orders, n, d = s.shape
    out = np.zeros((*lead, min(orders + 1, m + 2), n, d), np.result_type(s, through))
    out[..., :orders, :, :] = s
    highest = out.shape[-3] - 1
    out[..., 1:, :, :] += through[..., :highest, :, :]
    out[..., -1, :, :] += through[..., highest:, :, :].sum(axis=-3)
    return out


def padded(a: Array, m: int) -> Array:
    """Pad the second axis, of orders, with zeros up to order m + 1."""
    padding = m + 2 - a.shape[1]
    return np.pad(a, [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2))


def by_sum(pairs: Array, m: int) -> Array:
    """Sum pairs (k, j, i) of orders after and before a head by total order i + 1 + j, (k, order)."""
    out = np.zeros((len(pairs), m + 2), pairs.dtype)
    for j in range(pairs.shape[1]):
        for i in range(pairs.shape[2]):
            out[:, min(i + 1 + j, m + 1)] += pairs[:, j, i]
    return out


def heads_of(layers: Sequence[Layer]) -> tuple[Head, ...]:
    """Return the heads as (layer, head), first layer first."""
    return tuple((number, head) for number, layer in enumerate(layers) for head in range(len(layer.patterns)))


def path_arguments(function: str, stack: Any, x: Any) -> tuple[list[Layer], Array]:
    """Return the layers of a stack and the input stream, validated."""
    check_stack(function, stack)
    layers = [Layer.of(layer.terms, layer.constant) for layer in stack.layers]
    x = as_array(function, "x", x)
    if x.shape != layers[0].constant.shape:
        raise ArgumentError(
            f"{function}: x must have shape (positions, features) = {layers[0].constant.shape}, got {x.shape}; "
            "pass the input stream of the first layer, of one sequence."
        )
    return layers, x


def check_stack(function: str, stack: Any) -> None:
    """Raise `ArgumentTypeError` unless `stack` is a FrozenStack."""
    if not isinstance(stack, FrozenStack):
        raise ArgumentTypeError(
            f"{function}: stack must be a FrozenStack, got {type(stack).__name__}; "
            "freeze(checkpoint, patterns) makes one."
        )


def longest_order(function: str, max_order: int | None, n_layers: int) -> int:
    """Return the largest order that is listed separately."""
    return n_layers if max_order is None else min(as_count(function, "max_order", max_order, least=0), n_layers)
