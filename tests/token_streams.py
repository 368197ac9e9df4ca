"""What heads read of tokens and positions, written out: the oracles of head detectors, copying and vocabularies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from attention_layers import branches
from tnlib_adapters import Attention
from tnlib_adapters.reference.weights import Weights

N = 5  # positions


@dataclass(frozen=True)
class Stream:
    """What attention reads of tokens (vocab, d) and of positions (n, d): linear, the bias of norms with the tokens."""

    tokens: np.ndarray
    positions: np.ndarray


def through(stream: Stream, norm: Any, divisor: float | None = None) -> Stream:
    """A norm that divides by one number, the root mean square over tokens and positions unless it is given."""
    if norm is None:
        return stream
    c, p = stream.tokens, stream.positions
    if norm.centred:
        c, p = (x - x.mean(axis=1, keepdims=True) for x in (c, p))
    if divisor is None:
        divisor = np.sqrt(np.square(c[:, None] + p).mean() + norm.eps)
    return Stream(c / divisor * norm.weight + (0 if norm.bias is None else norm.bias), p / divisor * norm.weight)


def stream(weights: Weights, layer: int) -> Stream:
    embedding = weights.embedding
    table = embedding.tokens + (0 if embedding.segment is None else embedding.segment)
    places = embedding.positions
    of_positions = np.zeros((N, table.shape[1])) if places is None else places[:N]
    before = branches(weights)[layer].before
    found = through(Stream(table, of_positions), embedding.norm)
    if embedding.norm is None or before is None:
        return through(found, before)
    alone = embedding.norm(table)  # behind another norm, rows of tokens alone tell the divisor
    moments = alone.var(axis=1) if before.centred else np.square(alone).mean(axis=1)
    return through(found, before, np.sqrt(moments.mean() + before.eps))


def pieces(weights: Weights, layer: int, head: int) -> tuple[np.ndarray, ...]:
    """Queries and keys of tokens and of positions, biases with the tokens."""
    attention, x = branches(weights)[layer].layer.numerator(), stream(weights, layer)
    k = head // (attention.n_heads // attention.kv_heads)
    b = [0 if a is None else a[h] for a, h in ((attention.b_Q, head), (attention.b_K, k))]
    (wq, wk) = attention.W_Q[head], attention.W_K[k]
    return x.tokens @ wq + b[0], x.positions @ wq, x.tokens @ wk + b[1], x.positions @ wk


def meet(attention: Attention, q: np.ndarray, k: np.ndarray, i: int, j: int) -> np.ndarray:
    """Scores of queries (m, dh) at position i with keys (m', dh) at j, without scale and slope."""
    if attention.rotary is not None:
        q, k = attention.rotary.rotate(q, i), attention.rotary.rotate(k, j)
    return q @ k.T


def token_rows(weights: Weights) -> np.ndarray:
    """What the stream holds of each token alone."""
    embedding = weights.embedding
    rows = embedding.tokens + (0 if embedding.segment is None else embedding.segment)
    return rows if embedding.norm is None else embedding.norm(rows)


def without_weights(x: np.ndarray, norm_in_front: Any) -> np.ndarray:
    """The division of a norm alone."""
    if norm_in_front is None:
        return x
    x = x - x.mean(axis=1, keepdims=True) if norm_in_front.centred else x
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + norm_in_front.eps)
