r"""Token and position parts of queries and keys, for a stream that holds only embeddings.

A query is q = alpha_s + a_i with alpha_s of token s, biases included, and a_i of learned position i; a key is
k = beta_t + b_j, rotated by the distance where embeddings are rotary. Norms divide by one number for the whole
vocabulary, so that the parts add up.
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
    """Token and position parts of the queries and keys of one head.

    Parameters
    ----------
    attention
        Layer with this one head.
    queries, keys
        (tokens, d_head); one row if only the mean over tokens was requested.
    queries_at, keys_at
        (n, d_head), position parts; zeros unless positions are learned.
    """

    attention: Attention
    queries: Array
    keys: Array
    queries_at: Array
    keys_at: Array

    @property
    def n(self) -> int:
        """Number of positions."""
        return len(self.queries_at)

    def turned(self, keys: Array, distances: Array) -> Array:
        """Return keys (n, d_head) rotated by distances (n,): q . turned is their score."""
        rotary = self.attention.rotary
        return keys if rotary is None else np.asarray(rotary.rotate(rotary.rotate(keys, 0), -distances))

    def turns(self, distances: Array) -> Array | None:
        """Return the rotation matrices T(D) of key rows, k T(D), (distances, d_head, d_head), or None."""
        if self.attention.rotary is None:
            return None
        rows = np.eye(self.queries.shape[1])[None]
        return self.attention.rotary.rotate(self.attention.rotary.rotate(rows, 0), -distances[:, None])

    def slope(self) -> float:
        """Return the ALiBi penalty per position, before the score scale."""
        return 0.0 if self.attention.alibi is None else float(self.attention.alibi[0]) / self.attention.scale


def read_apart(found: StreamHead, words: Vocabulary, n: int, *, average: bool = False) -> Apart:
    """Return token parts (or their means) and n position parts of queries and keys."""
    layer = found.attention
    pairs = [_read(words, layer, name, found, n, average=average) for name in "QK"]
    (queries, queries_at), (keys, keys_at) = pairs
    return Apart(layer, queries, keys, queries_at, keys_at)


def _read(
    words: Vocabulary, layer: Attention, name: str, head: StreamHead, n: int, *, average: bool
) -> tuple[Array, Array]:
    weights = columns(layer, name)
    of_tokens, of_positions = words.read_apart(weights, head.norm, n, average=average)
    return of_tokens, np.zeros((n, weights.shape[1])) if of_positions is None else of_positions


def columns(layer: Attention, name: str) -> Array:
    """Return [W; b] of the queries or keys of a one-head layer, (d_model + 1, d_head)."""
    w, b = getattr(layer, f"W_{name}")[0], getattr(layer, f"b_{name}")
    return np.concatenate([w, np.zeros_like(w[:1]) if b is None else b])


def as_length(function: str, length: int | None, words: Vocabulary, layer: Attention) -> int:
    """Return the number of positions: `length`, or the context of the model, at most 256."""
    limits = [n for n in (layer.context, None if words.positions is None else len(words.positions)) if n is not None]
    if length is None:
        return min([_LONGEST, *limits])
    if (
        not isinstance(length, int | np.integer)
        or isinstance(length, bool)
        or not 2 <= length <= min([length, *limits])
    ):
        limit = f"{min(limits)}" if limits else "any number"
        raise ArgumentError(
            f"{function}: length must be an integer from 2 to {limit} of positions, got {length!r}; "
            "leave it out for the model's own."
        )
    return int(length)
