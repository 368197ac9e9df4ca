r"""The forward pass of one attention layer: queries, keys, values, scores, patterns and output.

It broadcasts over any axes between heads and positions. The stream is (n, d_model), or (heads, ..., n, d_model) where
every head reads a stream of its own, or (1, ..., n, d_model): sequences of a batch, or parts of a stream. Projections
are linear in the homogeneous coordinates [x, constant], so that of parts one has the constant 1 and the others 0. For
gradients the stream may be a tensor of torch.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count
from tnlib_adapters.architectures.grouped_heads import GroupedHeads
from tnlib_adapters.attention.frozen_attention import as_patterns
from tnlib_adapters.attention.norms import HeadNorm, LatentNorm
from tnlib_adapters.attention.relative_bias import RelativeBias
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.attention.softmax import like, matmul, soft_capped, softmax
from tnlib_adapters.attention.validation import as_distances, as_stream, check_facts, check_shapes

_ARRAYS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "alibi")


@dataclass(frozen=True, eq=False, repr=False)
class AttentionWeights(GroupedHeads):
    """Weights per head, acting on rows: the fields of `Attention`, and its forward pass."""

    W_Q: Array
    W_K: Array
    W_V: Array
    W_O: Array
    scale: float
    b_Q: Array | None = None
    b_K: Array | None = None
    b_V: Array | None = None
    b_O: Array | None = None
    rotary: Rotary | None = None
    alibi: Array | None = None
    relative_bias: RelativeBias | None = None
    head_norm: HeadNorm | None = None
    latent_norm: LatentNorm | None = None
    softcap: float | None = None
    causal: bool = True
    window: int | None = None
    context: int | None = None
    cross: bool = False

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else as_array("Attention", name, value))
        if not isinstance(self.scale, numbers.Real) or isinstance(self.scale, bool):
            raise ArgumentTypeError(f"Attention: scale must be a real number, got {self.scale!r}; pass 1/sqrt(d_head).")
        limits = {"softcap": self.softcap, "window": self.window, "context": self.context}
        check_facts(self.rotary, self.relative_bias, self.head_norm, self.latent_norm, **limits)
        positions = (self.rotary, self.alibi, self.relative_bias, self.latent_norm, self.window)
        if self.cross and (self.causal or any(value is not None for value in positions)):
            raise ArgumentError(
                "Attention: cross-attention must have no mask, positions and latent vectors, because queries and keys "
                "are of two sequences, got one of them; pass causal=False and leave the others out."
            )
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        check_shapes(arrays, 0 if self.rotary is None else self.rotary.n_columns, self.relative_bias)

    def __repr__(self) -> str:
        shared = "" if self.kv_heads == self.n_heads else f" on {self.kv_heads} key and value heads"
        options = {
            "rotary": self.rotary,
            "ALiBi": self.alibi,
            "relative bias": self.relative_bias,
            "normalised queries and keys": self.head_norm,
            "normalised latent vectors": self.latent_norm,
            "soft cap": self.softcap,
            "window": self.window,
            "cross-attention": self.cross or None,
        }
        more = "".join(f", {option}" for option, value in options.items() if value is not None)
        sizes = f"{self.n_heads} heads of {self.d_head}{shared}, d_model {self.d_model}, scale {self.scale:.4g}"
        return f"Attention({sizes}{more})"

    @property
    def n_heads(self) -> int:  # type: ignore[override]
        """Number of query heads."""
        return len(self.W_Q)

    @property
    def kv_heads(self) -> int:  # type: ignore[override]
        """Number of key and value heads."""
        return len(self.W_K)

    def with_bias(self, letter: str, head: int | slice = slice(None)) -> Array:
        """Return [W; b] of the projection "Q", "K" or "V" of a head, (d_model + 1, d_head), or of all heads.

        The bias is zero where absent.
        """
        weight, bias = getattr(self, f"W_{letter}")[head], getattr(self, f"b_{letter}")
        last = np.zeros_like(weight[..., :1, :]) if bias is None else bias[head][..., None, :]
        return np.concatenate([weight, last], axis=-2)

    def of_heads(self, heads: Sequence[int] | Array, kv_heads: Array | None = None) -> Self:
        """Return the layer with some query heads, and some key and value heads, by default one for each of them."""
        queries = np.array(heads)
        index_of = dict.fromkeys(("W_Q", "W_O", "b_Q", "alibi"), queries)
        keys = queries // self.group_size if kv_heads is None else kv_heads
        index_of |= dict.fromkeys(("W_K", "W_V", "b_K", "b_V"), keys)
        arrays = {name: None if (a := getattr(self, name)) is None else a[index] for name, index in index_of.items()}
        of_heads = None if self.relative_bias is None else self.relative_bias.of_heads(queries)
        return replace(self, **arrays, relative_bias=of_heads)  # type: ignore[arg-type]

    def astype(self, dtype: DTypeLike) -> Self:
        """Return the layer with weights, biases and norms in another precision."""

        def converted(part: Any) -> dict[str, Any]:
            return {name: a.astype(dtype, copy=False) for name, a in vars(part).items() if isinstance(a, np.ndarray)}

        norms = {"head_norm": self.head_norm, "latent_norm": self.latent_norm}
        changed: dict[str, Any] = {
            name: replace(norm, **converted(norm)) for name, norm in norms.items() if norm is not None
        }
        return replace(self, **converted(self), **changed)

    @property
    def d_model(self) -> int:
        """Dimension of the residual stream."""
        return int(self.W_Q.shape[1])

    @property
    def d_head(self) -> int:
        """Dimension of the queries and keys of one head."""
        return int(self.W_Q.shape[2])

    @property
    def d_value(self) -> int:
        """Dimension of the values of one head."""
        return int(self.W_V.shape[2])

    @property
    def is_bilinear(self) -> bool:
        """False if queries and keys, or the latent vectors from which they are made, are normalised."""
        return self.head_norm is None and self.latent_norm is None

    def scores(self, x: Array, memory: Array | None = None) -> Array:
        """Return the scores (heads, n, n) of x (n, d_model), at positions 0 ... n - 1, before any mask and softmax.

        Positions, scale and soft cap are included. ALiBi is 0 at distance 0; models with another origin differ by a
        constant per row, to which softmax is invariant. In cross-attention keys are those of `memory` (n', d_model),
        the output of the encoder, and the scores (heads, n, n').
        """
        self._check_cross("scores", "memory", memory, "it is the output of the encoder, (positions, d_model)")
        x = self._input("scores", x)
        keys_of = x if memory is None else self._input("scores", memory, "memory")
        positions = np.arange(len(x))
        q, k = self.queries(x, positions), self.keys(keys_of, np.arange(len(keys_of)))
        return self.scores_of(q, k, positions[:, None] - positions)

    def queries(self, x: Array, positions: Array, constant: Array | float = 1.0) -> Array:
        """Return queries (heads, ..., n, d_head) of a stream at integer positions (n,), normed and rotated."""
        return self.as_queries(_project(x, constant, self.W_Q, self.b_Q), x, positions)

    def keys(self, x: Array, positions: Array, constant: Array | float = 1.0) -> Array:
        """Return keys (kv_heads, ..., n, d_head) of a stream at integer positions (n,), normed and rotated."""
        return self.as_keys(_project(x, constant, self.W_K, self.b_K), x, positions)

    def values(self, x: Array, constant: Array | float = 1.0) -> Array:
        """Return values (kv_heads, ..., n, d_value) of a stream, biases included."""
        v = _project(x, constant, self.W_V, self.b_V)  # kv ... n dh
        return v if self.latent_norm is None else v / self.latent_norm.value_divisors(x)

    def as_queries(self, columns: Array, x: Array, positions: Array, total: Array | None = None) -> Array:
        """Return queries of projected `columns` (..., n, d_head), normed for the stream x and rotated to positions.

        `total` are the columns whose root mean square the QK norm divides by, if these are only a part of them.
        """
        if self.latent_norm is not None:
            columns = self.latent_norm.queries(columns, x)
        if self.head_norm is not None:
            columns = self.head_norm.divided(columns, self.head_norm.query, total)
        return columns if self.rotary is None else self.rotary.rotated(columns, positions)

    def as_keys(self, columns: Array, x: Array, positions: Array, total: Array | None = None) -> Array:
        """Return keys of projected `columns`, as `as_queries` does for queries."""
        if self.latent_norm is not None:
            columns = self.latent_norm.keys(columns, x)
        if self.head_norm is not None:
            columns = self.head_norm.divided(columns, self.head_norm.key, total)
        return columns if self.rotary is None else self.rotary.rotated(columns, positions)

    def scores_of(self, queries: Array, keys: Array, distances: Array) -> Array:
        """Return scores (heads, ..., m, n) of queries (heads, ..., m, d_head) and keys (kv_heads, ..., n, d_head).

        `distances` (m, n) are query positions minus key positions; not used in cross-attention.
        """
        return soft_capped(self.bilinear_scores(queries, keys, distances), self.softcap)

    def bilinear_scores(self, queries: Array, keys: Array, distances: Array | None) -> Array:
        """Return the scores before a soft cap; without what the distances add if they are None."""
        return self.scaled(matmul(queries, self.repeated(keys).swapaxes(-1, -2)), distances)  # h ... m [dh] n

    def scaled(self, products: Array, distances: Array | None) -> Array:
        """Return `products` (heads, ..., m, n) of queries and keys, overwritten by the scores before a soft cap."""
        products *= self.scale
        offsets = None if distances is None else self.offsets(distances)  # h m n
        if offsets is not None:
            products += like(offsets.reshape(len(offsets), *(1,) * (products.ndim - 3), *offsets.shape[1:]), products)
        return products

    def patterns_of(self, scores: Array) -> Array:
        """Return attention weights of scores (heads, ..., m, n); without cross-attention of the last m of n queries."""
        m, n = scores.shape[-2:]
        return softmax(scores, None if self.cross else self.mask(n)[n - m :])

    def head_outputs(self, patterns: Array, values: Array) -> Array:
        """Return what every head writes, (heads, ..., m, d_model), for patterns (heads, ..., m, n) and values."""
        mixed = matmul(patterns, self.repeated(values))  # h ... m [n] dh
        return _by_head(mixed, self.W_O)  # h ... m [dh] d_model

    def offsets(self, distances: Array) -> Array | None:
        """Return what ALiBi or a relative bias adds to the scores at integer distances; heads first, then their shape.

        None where scores have no additive part.
        """
        if self.relative_bias is not None:
            return self.relative_bias.at(distances)
        distance = np.asarray(distances)
        return None if self.alibi is None else -np.multiply.outer(self.alibi, distance)

    @property
    def depends_on_distance(self) -> bool:
        """True if scores depend on the distance of query and key."""
        return not (self.rotary is None and self.alibi is None and self.relative_bias is None)

    def distance(self, function: str, distance: int | None) -> int:
        """Return a distance within the context, validated for `function`; 0 for None where scores do not need one."""
        if distance is None and self.depends_on_distance:
            why = "rotary embeddings turn queries and keys" if self.rotary else "ALiBi or a relative bias adds to them"
            raise ArgumentError(
                f"{function}: distance must be given, because scores depend on it ({why}), got None; "
                "pass the position of the query less that of the key, for example distance=1."
            )
        if distance is not None and (not isinstance(distance, int | np.integer) or isinstance(distance, bool)):
            raise ArgumentTypeError(
                f"{function}: distance must be an integer, got {distance!r:.80}; count positions from the key to the "
                "query."
            )
        return int(as_distances(function, "distance", [0 if distance is None else distance], self.context)[0])

    def mask(self, n: int, n_keys: int | None = None) -> Array:
        """Return the attention mask, bool (n, n): True where position i may attend to position j.

        In cross-attention (n, n_keys), True everywhere.
        """
        n = as_count("Attention.mask", "n", n)
        self._check_cross("mask", "n_keys", n_keys, "it is the length of the memory")
        if n_keys is not None:
            return np.ones((n, as_count("Attention.mask", "n_keys", n_keys)), bool)
        distance = np.arange(n)[:, None] - np.arange(n)  # n n
        reach = n if self.window is None else self.window
        visible: Array = (distance < reach) & ((distance >= 0) if self.causal else (distance > -reach))
        return visible

    def output(self, patterns: Array, x: Array) -> Array:
        """Return the output (n, d_model) for x (n', d_model) with attention weights (heads, n, n'), biases included.

        x is what the values read: the memory in cross-attention.
        """
        return self.output_of_values(self.weighted_values(patterns, x))

    def weighted_values(self, patterns: Array, x: Array) -> Array:
        """Return the values of x (n', d_model), biases included, summed with attention weights (heads, n, n').

        The result is (heads, n, d_value).
        """
        patterns, x = as_patterns("output", patterns, self.n_heads), self._input("output", x)
        return np.asarray(patterns @ self.repeated(self.values(x)))  # h n [n'] dh

    def output_of_values(self, values: Array) -> Array:
        """Return the output (n, d_model) for weighted values (heads, n, d_value), the output bias included."""
        rows = values.transpose(1, 0, 2).reshape(values.shape[1], -1)  # n (h dh)
        out: Array = np.matmul(rows, self.W_O.reshape(-1, self.W_O.shape[-1]), order="F")  # n [h dh] d_model
        return out if self.b_O is None else np.add(out, self.b_O, out=out)

    def value_divisors(self, x: Array) -> Array | None:
        """Return what the values of x (n, d_model) are divided by, (n,), None unless latent vectors are normalised."""
        x = self._input("value_divisors", x)
        return None if self.latent_norm is None else self.latent_norm.value_divisors(x)[:, 0]

    def _check_cross(self, method: str, parameter: str, value: Any, remedy: str) -> None:
        """Raise `ArgumentError` unless a parameter is given in cross-attention alone."""
        if self.cross != (value is not None):
            needed = "must be given for" if self.cross else "is only for"
            received = f"{type(value).__name__}" if np.ndim(value) else f"{value!r}"
            raise ArgumentError(f"Attention.{method}: {parameter} {needed} cross-attention, got {received}; {remedy}.")

    def _input(self, method: str, x: Array, parameter: str = "x") -> Array:
        return as_stream(f"Attention.{method}", parameter, x, self.d_model, self.context)


def _project(x: Array, constant: Array | float, weight: Array, bias: Array | None) -> Array:
    """Return [x, constant] times [weight; bias], (heads, ..., n, columns)."""
    out = _by_head(x, weight)
    if bias is None:
        return out
    rows = bias.reshape(len(bias), *(1,) * (out.ndim - 2), -1)  # h ... 1 dh
    return out + constant * like(rows, out)


def _by_head(x: Array, weight: Array) -> Array:
    """Return x (n, d), or (heads or 1, ..., n, d), times the weight (heads, d, columns) of every head."""
    rows = x if x.ndim == 2 else x.reshape(len(x), -1, x.shape[-1])
    products = matmul(rows, like(weight, x))  # h (... n) [d] c
    return products if x.ndim < 4 else products.reshape(len(weight), *x.shape[1:-1], -1)
