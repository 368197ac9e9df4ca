"""One attention layer as operators, biases included."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, KroneckerTerms, LowRank
from tnlib._typing import Array
from tnlib._validate import as_array


@dataclass(frozen=True, eq=False, repr=False)
class FrozenAttention:
    """A layer whose patterns are fixed: the affine map x -> terms x + constant; unpacks to the two.

    Parameters
    ----------
    terms
        sum_h A^h (x) (W_V^h W_O^h)^T on arrays (positions, d_model).
    constant
        (positions, d_model): what the value and output biases add.
    """

    terms: KroneckerTerms
    constant: Array

    def __repr__(self) -> str:
        return f"FrozenAttention({self.terms!r} and a constant of shape {self.constant.shape})"

    def __iter__(self) -> Iterator[Any]:
        return iter((self.terms, self.constant))

    def apply(self, x: Array) -> Array:
        """Return the layer's output (positions, d_model) for x (positions, d_model)."""
        return self.terms.apply(x) + self.constant


@dataclass(frozen=True, eq=False, repr=False)
class Attention:
    r"""The weights of one attention layer, per head, acting on rows: q = x W_Q + b_Q.

    In homogeneous coordinates x~ = [x, 1] every head is two bilinear forms without biases:

        score_ij = scale * x~_i Omega x~_j^T,      Omega = [W_Q; b_Q] [W_K; b_K]^T
        value_j  = x~_j OV,                        OV    = [W_V; b_V] [W_O, 0]

    Parameters
    ----------
    W_Q
        (heads, d_model, d_head).
    W_K, W_V
        (kv_heads, d_model, d_head); kv_heads divides heads, head h reads key head h // (heads / kv_heads).
    W_O
        (heads, d_head, d_model).
    scale
        Factor of the scores, never folded into an operator.
    b_Q
        (heads, d_head), None where absent.
    b_K, b_V
        (kv_heads, d_head), None where absent.
    b_O
        (d_model,), None where absent.

    Raises
    ------
    ArgumentError
        If a shape contradicts W_Q.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> layer.qk(0)
    LowRank(shape 65 x 65, ranks (16,), 2,080 numbers, float32)
    """

    W_Q: Array
    W_K: Array
    W_V: Array
    W_O: Array
    scale: float
    b_Q: Array | None = None
    b_K: Array | None = None
    b_V: Array | None = None
    b_O: Array | None = None

    def __post_init__(self) -> None:
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else as_array("Attention", name, value))
        if not isinstance(self.scale, numbers.Real) or isinstance(self.scale, bool):
            raise ArgumentTypeError(f"Attention: scale must be a real number, got {self.scale!r}; pass 1/sqrt(d_head).")
        if self.W_Q.ndim != 3 or self.W_K.ndim != 3 or not len(self.W_K) or len(self.W_Q) % len(self.W_K):
            raise ArgumentError(
                "Attention: W_Q must have shape (heads, d_model, d_head) and W_K (kv_heads, d_model, d_head) with "
                f"kv_heads dividing heads, got {self.W_Q.shape} and {self.W_K.shape}; reshape them per head."
            )
        heads, d_model, d_head = self.W_Q.shape
        kv_heads = len(self.W_K)
        expected = {
            "W_K": (kv_heads, d_model, d_head),
            "W_V": (kv_heads, d_model, d_head),
            "W_O": (heads, d_head, d_model),
            "b_Q": (heads, d_head),
            "b_K": (kv_heads, d_head),
            "b_V": (kv_heads, d_head),
            "b_O": (d_model,),
        }
        for name, shape in expected.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ArgumentError(
                    f"Attention: {name} must have shape {shape} beside W_Q {self.W_Q.shape}, got {value.shape}; "
                    "weights act on rows, per head."
                )

    def __repr__(self) -> str:
        shared = "" if self.kv_heads == self.n_heads else f" on {self.kv_heads} key and value heads"
        return (
            f"Attention({self.n_heads} heads of {self.d_head}{shared}, d_model {self.d_model}, scale {self.scale:.4g})"
        )

    @property
    def n_heads(self) -> int:
        """Count of query heads."""
        return len(self.W_Q)

    @property
    def kv_heads(self) -> int:
        """Count of key and value heads."""
        return len(self.W_K)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return int(self.W_Q.shape[1])

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return int(self.W_Q.shape[2])

    def qk(self, head: int) -> LowRank:
        """Return Omega (d_model + 1, d_model + 1) of a head, rank at most d_head, biases included.

        The score of positions i and j is scale * x~_i Omega x~_j^T with x~ = [x, 1].
        """
        q, k = self._head("qk", head)
        left = _with_bias(self.W_Q[q], None if self.b_Q is None else self.b_Q[q])  # d~ dh
        right = _with_bias(self.W_K[k], None if self.b_K is None else self.b_K[k])  # d~ dh
        return LowRank(left, right.T)

    def ov(self, head: int) -> LowRank:
        """Return OV (d_model + 1, d_model + 1) of a head, rank at most d_head, value bias included.

        x~ OV is what the head writes for a position that attends to x alone. The last column is zero: a head
        leaves the homogeneous coordinate as it is. The output bias belongs to the layer, not to a head.
        """
        h, v = self._head("ov", head)
        left = _with_bias(self.W_V[v], None if self.b_V is None else self.b_V[v])  # d~ dh
        right = np.concatenate([self.W_O[h], np.zeros_like(self.W_O[h][:, :1])], axis=1)  # dh d~
        return LowRank(left, right)

    def scores(self, x: Array) -> Array:
        """Return the scores (heads, n, n) of x (n, d_model), scaled, before any mask and softmax."""
        x = self._input("scores", x)
        group = self.n_heads // self.kv_heads
        q = _project(x, self.W_Q, self.b_Q)  # h n dh
        k = np.repeat(_project(x, self.W_K, self.b_K), group, axis=0)  # h n dh
        scores: Array = self.scale * (q @ k.transpose(0, 2, 1))  # h n [dh] n
        return scores

    def frozen(self, patterns: Array) -> FrozenAttention:
        """Return the layer as an affine map of the whole sequence, with its patterns fixed.

        Parameters
        ----------
        patterns
            (heads, n, n'), the weight that position i gives to position j; rows need not sum to one.

        Returns
        -------
        FrozenAttention
            `terms` with right factors held as `LowRank`, and the `constant` of the biases: row i of it is
            sum_h (sum_j A^h_ij) b_V^h W_O^h + b_O.

        Raises
        ------
        ArgumentError
            If there is not one matrix per head.
        """
        patterns = as_array("Attention.frozen", "patterns", patterns)
        if patterns.ndim != 3 or len(patterns) != self.n_heads:
            raise ArgumentError(
                f"Attention.frozen: patterns must have shape (heads, n, n') with {self.n_heads} heads, "
                f"got {patterns.shape}; pass one matrix per head."
            )
        group = self.n_heads // self.kv_heads
        right = [LowRank(self.W_O[h].T, self.W_V[h // group].T) for h in range(self.n_heads)]  # d [dh] d
        dtype = np.result_type(patterns, self.W_O)
        constant = np.zeros((patterns.shape[1], self.d_model), dtype)
        if self.b_V is not None:
            b_v = np.repeat(self.b_V, group, axis=0)
            constant += np.einsum("hij,hk,hkd->id", patterns, b_v, self.W_O, optimize=True)  # n d
        if self.b_O is not None:
            constant += self.b_O
        return FrozenAttention(KroneckerTerms(patterns, tuple(right)), constant)

    def stacked(self) -> Array:
        """Return all weights as one array (projection, head, d_model, d_head), projections in the order Q, K, V, O.

        Key and value heads that several query heads share are repeated; W_O is transposed to fit.
        """
        group = self.n_heads // self.kv_heads
        k, v = (np.repeat(w, group, axis=0) for w in (self.W_K, self.W_V))
        return np.stack([self.W_Q, k, v, self.W_O.transpose(0, 2, 1)])

    def _head(self, method: str, head: int) -> tuple[int, int]:
        """Return the query head and the key head it reads, both counted from 0."""
        head = as_index(f"Attention.{method}", "head", head, self.n_heads)
        return head, head // (self.n_heads // self.kv_heads)

    def _input(self, method: str, x: Array) -> Array:
        x = as_array(f"Attention.{method}", "x", x)
        if x.ndim != 2 or x.shape[1] != self.d_model:
            raise ArgumentError(
                f"Attention.{method}: x must have shape (positions, {self.d_model}), got {x.shape}; "
                "pass one sequence at a time."
            )
        return x


def as_index(function: str, parameter: str, value: Any, count: int) -> int:
    """Return a number in 0 ... count - 1; negative ones count from the end."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ArgumentTypeError(f"{function}: {parameter} must be an integer, got {value!r}; count from 0.")
    if not -count <= value < count:
        raise ArgumentError(
            f"{function}: {parameter} must lie between 0 and {count - 1}, got {value}; there are {count} of them."
        )
    return int(value) % count


def _with_bias(weight: Array, bias: Array | None) -> Array:
    """Append the bias as the row that the constant coordinate meets."""
    last = np.zeros_like(weight[:1]) if bias is None else bias[None]
    return np.concatenate([weight, last])


def _project(x: Array, weight: Array, bias: Array | None) -> Array:
    out: Array = x @ weight  # h n [d] dh
    return out if bias is None else out + bias[:, None]
