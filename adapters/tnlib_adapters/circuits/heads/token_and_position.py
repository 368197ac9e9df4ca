r"""Queries and keys of a head when the stream holds a token and its position, and nothing that a layer wrote.

A query is q = alpha_s + a_i with alpha of the token s, biases included, and a of a learned position i; a key is
k = beta_t + b_j, turned by the distance where embeddings are rotary. Norms divide by one number for all of them, so
that parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.heads.effective_head import StreamHead
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary

_LONGEST = 256  # positions


@dataclass(frozen=True, eq=False)
class Apart:
    """What of a query and of a key is the token's and what the position's.

    Parameters
    ----------
    attention
        The head, a layer of its own.
    queries, keys
        (tokens, d_head); one row where only the mean over tokens was asked for.
    queries_at, keys_at
        (n, d_head), of positions; zeros where they are not learned.
    """

    attention: Attention
    queries: Array
    keys: Array
    queries_at: Array
    keys_at: Array

    @property
    def n(self) -> int:
        """Count of positions."""
        return len(self.queries_at)

    def turned(self, keys: Array, distances: Array) -> Array:
        """Return keys (n, d_head) as a query meets them at these distances (n,): q . turned is their score."""
        rotary = self.attention.rotary
        return keys if rotary is None else np.asarray(rotary.rotate(rotary.rotate(keys, 0), -distances))

    def turns(self, distances: Array) -> Array | None:
        """Return the matrices T(D) that turn keys as rows, k T(D), (distances, d_head, d_head); None where none do."""
        if self.attention.rotary is None:
            return None
        rows = np.eye(self.queries.shape[1])[None]
        return self.attention.rotary.rotate(self.attention.rotary.rotate(rows, 0), -distances[:, None])

    def slope(self) -> float:
        """Return what a score falls by per position, before it is scaled."""
        return 0.0 if self.attention.alibi is None else float(self.attention.alibi[0]) / self.attention.scale


def read_apart(found: StreamHead, words: Vocabulary, n: int, *, average: bool = False) -> Apart:
    """Return queries and keys of tokens, or their means, and of n positions, apart."""
    layer = found.attention
    both = [_read(words, layer, name, found, n, average=average) for name in "QK"]
    (queries, queries_at), (keys, keys_at) = both
    return Apart(layer, queries, keys, queries_at, keys_at)


def _read(
    words: Vocabulary, layer: Attention, name: str, found: StreamHead, n: int, *, average: bool
) -> tuple[Array, Array]:
    wanted = columns(layer, name)
    of_tokens, of_positions = words.read_apart(wanted, found.norm, n, average=average)
    return of_tokens, np.zeros((n, wanted.shape[1])) if of_positions is None else of_positions


def columns(layer: Attention, name: str) -> Array:
    """Return [W; b] of the queries or keys of a layer of one head, (d_model + 1, d_head)."""
    w, b = getattr(layer, f"W_{name}")[0], getattr(layer, f"b_{name}")
    return np.concatenate([w, np.zeros_like(w[:1]) if b is None else b])


def as_length(function: str, length: int | None, words: Vocabulary, layer: Attention) -> int:
    """Return how many positions to look at: as many as are asked for, or as the model takes, at most 256."""
    known = [n for n in (layer.context, None if words.positions is None else len(words.positions)) if n is not None]
    if length is None:
        return min([_LONGEST, *known])
    if not isinstance(length, int | np.integer) or isinstance(length, bool) or not 2 <= length <= min([length, *known]):
        most = f"{min(known)}" if known else "any number"
        raise ArgumentError(
            f"{function}: length must be an integer from 2 to {most} of positions, got {length!r}; "
            "leave it out for the model's own."
        )
    return int(length)
