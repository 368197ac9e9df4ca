r"""Effective weights of one head with respect to the residual stream, and its queries and keys by token and position.

A norm is n(x) diag(w) + b with n(x) = (x - mean) / rms, or x / rms. The input of the head is

    (n(x) diag(w) + b) W + c  =  n(x) (diag(w) W) + (b W + c)

and as the entries of LayerNorm's n sum to zero, the mean of diag(w) W over features has no effect. The directions that
a head reads are therefore directions of the stream, up to division by one number per position.

For a stream that holds only embeddings, a query is q = alpha_s + a_i with alpha_s of token s, biases included, and a_i
of learned position i; a key is k = beta_t + b_j, rotated by the distance where embeddings are rotary. Norms divide by
one number for the whole vocabulary, so that the parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_one_stream
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary
from tnlib_adapters.reference.layers import Norm
from tnlib_adapters.reference.weights import read_norm

_LONGEST = 256  # positions


@dataclass(frozen=True, eq=False)
class StreamHead:
    """A head, or all heads of a layer, that reads n(x) and writes into the residual stream.

    Parameters
    ----------
    attention
        Layer with this one head, or with all, in float64.
    norm
        Norm before the head, without its weights and biases, which are in `attention`. None if there is none.
    notes
        Sentences on the parts of the model that `attention` omits.
    """

    attention: Attention
    norm: Norm | None
    notes: tuple[str, ...]


def stream_head(function: str, checkpoint: Checkpoint, layer: int, head: int | None) -> StreamHead:
    """Return one head of a checkpoint, or all of a layer (None), with the linear part of the adjacent norms folded in.

    Weights are in float64.
    """
    layer = as_index(function, "layer", layer, as_one_stream(function, checkpoint, "model").n_layers)
    if head is None:
        attention = checkpoint.attention(layer)
    else:
        attention = checkpoint.head(layer, as_index(function, "head", head, checkpoint.sizes.n_heads))
    attention, notes = attention.astype(np.float64), []
    if not attention.is_bilinear:
        normalised = "queries and keys" if attention.latent_norm is None else "latent vectors"
        attention = attention.numerator()
        notes.append(f"{normalised} are normalised; the divisions are left out")
    wiring = checkpoint.wiring.layers[layer].attention
    before, after = read_norm(checkpoint, wiring.pre_norm), read_norm(checkpoint, wiring.output_norm)
    if before is not None:
        attention = _read_through(attention, before)
        notes.append("weights of the norm in front are folded in, its division is left out")
    if after is not None:
        attention = replace(attention, W_O=attention.W_O * after.weight)
        notes.append("weights of the norm behind are folded in, its division is left out")
    return StreamHead(attention, before, tuple(notes))


def _read_through(attention: Attention, norm: Norm) -> Attention:
    changed: dict[str, Any] = {}
    for name in "QKV":
        w, b = getattr(attention, f"W_{name}"), getattr(attention, f"b_{name}")
        if norm.bias is not None:
            b = norm.bias @ w + (0 if b is None else b)  # h [d] dh
        w = norm.weight[:, None] * w
        changed |= {f"W_{name}": w - w.mean(axis=1, keepdims=True) if norm.centred else w, f"b_{name}": b}
    return replace(attention, **changed)


@dataclass(frozen=True, eq=False)
class TokenPositionParts:
    """Token and position parts of the queries and keys of one head."""

    attention: Attention  # layer with this one head
    queries: Array  # (tokens, d_head)
    keys: Array
    queries_at: Array  # (n, d_head), position parts; zeros unless positions are learned
    keys_at: Array

    @property
    def n(self) -> int:
        """Number of positions."""
        return len(self.queries_at)

    def turned(self, keys: Array, distances: Array) -> Array:
        """Return keys (n, d_head) rotated by distances (n,): q . turned is their score."""
        rotary = self.attention.rotary
        return keys if rotary is None else np.asarray(rotary.rotate(rotary.rotate(keys, 0), -distances))

    def offsets(self, distances: Array) -> Array:
        """Return what ALiBi or a relative bias adds to the scores at distances, before the score scale."""
        offsets = self.attention.offsets(distances)
        return np.zeros(len(distances)) if offsets is None else offsets[0] / self.attention.scale


def key_turns(layer: Attention, distances: Array) -> Array | None:
    """Return the rotation matrices T(D) of key rows, k T(D), (distances, d_head, d_head), None without rotation."""
    if layer.rotary is None:
        return None
    return layer.rotary.rotate(layer.rotary.rotate(np.eye(layer.d_head)[None], 0), -distances[:, None])


def split_queries_and_keys(head: StreamHead, words: Vocabulary, n: int) -> TokenPositionParts:
    """Return token parts and n position parts of queries and keys."""
    layer, arrays = head.attention, []
    for name in "QK":
        weights = layer.with_bias(name, 0)  # d~ dh
        of_tokens, of_positions = words.read_by_source(weights, head.norm, n)
        arrays.append((of_tokens, np.zeros((n, layer.d_head)) if of_positions is None else of_positions))
    (queries, queries_at), (keys, keys_at) = arrays
    return TokenPositionParts(layer, queries, keys, queries_at, keys_at)


def mean_queries_and_keys(head: StreamHead, words: Vocabulary, n: int, stream: Array | None) -> list[Array]:
    """Return queries and keys (heads, n, d_head) of one input at n positions, before their rotation.

    It is the mean of n(x) over a stream (..., d_model), or the mean embedding plus learned positions if that is None.
    """
    weights = np.concatenate([head.attention.with_bias(name) for name in "QK"])  # h d~ dh
    columns = weights.transpose(1, 0, 2).reshape(weights.shape[1], -1)
    if stream is None:
        rows = sum(a for a in words.read_by_source(columns, head.norm, n, average=True) if a is not None)
    else:
        x = stream.reshape(-1, stream.shape[-1]).astype(np.float64)
        if head.norm is not None:
            x = head.norm.centre(x)
            x = x / head.norm.divisors(x)
        rows = np.append(x.mean(axis=0), 1.0)[None] @ columns
    by_head = np.broadcast_to(rows, (n, columns.shape[1])).reshape(n, len(weights), -1)
    return np.split(by_head.transpose(1, 0, 2), [head.attention.n_heads])  # h n dh


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
