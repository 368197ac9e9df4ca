"""Sequences in which a segment occurs twice, of random tokens or of a text, for the measurement of induction."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count, to_numpy
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.embedding import TokenEmbedding
from tnlib_adapters.reference.weights import Weights

_LONGEST = 96  # positions of sequences with segments of random length
_LENGTH = 24  # tokens of a segment, for models of text


def random_segments(function: str, weights: Weights, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return n sequences with a segment of random length at random offsets, and where it is repeated."""
    context = min(_LONGEST, weights.context or _LONGEST)
    if context < 48:
        raise ArgumentError(
            f"{function}: model must hold sequences of 48 tokens, got a context of {context}; shorter repeats are too "
            "noisy."
        )
    return repeated_segments(n, vocab=len(_table(weights)), context=context, rng=rng)


def segments_twice(
    function: str, weights: Weights, n: int, length: int | None, text: Any, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Return n sequences (n, 2 length), a segment followed by itself, and where its tokens are predictable.

    Segments are of `text` (m,) at random offsets, or of random tokens for None.
    """
    length = as_count(function, "length", _LENGTH if length is None else length, least=4)
    if weights.context is not None and 2 * length > weights.context:
        raise ArgumentError(
            f"{function}: length must be at most {weights.context // 2}, half the context of the model, got {length}; "
            "pass a smaller one."
        )
    vocab = len(_table(weights))
    if text is None:
        segments = rng.integers(0, vocab, (n, length))
    else:
        tokens = to_numpy(function, "text", text)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1 or len(tokens) < length:
            raise ArgumentError(
                f"{function}: text must be at least {length} token numbers, (m,), got {tokens.dtype} of shape "
                f"{tokens.shape}; pass the input_ids of a text."
            )
        weights.embedding.check(function, tokens, None, "text")  # type: ignore[call-arg]
        starts = rng.integers(0, len(tokens) - length, n, endpoint=True)
        segments = tokens[starts[:, None] + np.arange(length)]
    tokens = np.tile(segments, (1, 2))
    return tokens, np.broadcast_to(np.arange(2 * length) > length, tokens.shape).copy()


def _table(weights: Weights) -> Array:
    embedding: TokenEmbedding = weights.embedding  # type: ignore[assignment]
    return embedding.tokens
