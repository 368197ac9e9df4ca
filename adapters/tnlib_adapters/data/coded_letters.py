"""Sequences for the built-in model with a known circuit: letters, then queries with coded answers."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib._validate import as_count, as_rng

CODES = 16  # letters, and as many codes
CIRCUIT = (
    "tokens -> 0.0 V",
    "0.0 -> 1.0 K",
    "tokens -> 1.0 Q",
    "tokens -> 1.0 V",
    "1.0 -> mlp 1",
    "mlp 1 -> logits",
)
_LETTERS, _QUERIES = 8, 4
_CODE = np.random.default_rng(0).permutation(CODES)


def coded_letters(n_sequences: int, *, rng: int | np.random.Generator = 0) -> tuple[Array, Array]:
    """Return sequences of the built-in model "known_circuit", (n_sequences, 16), and a mask of their answers.

    Eight distinct letters, numbers below 16, are followed by four pairs of one of them and of the code, 16 or more, of
    the letter that came after it. `CIRCUIT` are the edges that carry the answer; heads read positions beside them.

    Raises
    ------
    ArgumentError
        If `n_sequences` is not positive.

    Examples
    --------
    >>> tokens, answers = coded_letters(2, rng=1)
    >>> tokens.shape, answers[0].nonzero()[0].tolist(), bool((tokens[:, :8] < 16).all())
    ((2, 16), [9, 11, 13, 15], True)
    """
    n, rng = as_count("coded_letters", "n_sequences", n_sequences), as_rng("coded_letters", rng)
    letters = rng.permuted(np.tile(np.arange(CODES), (n, 1)), axis=1)[:, :_LETTERS]
    queries = rng.permuted(np.tile(np.arange(_LETTERS - 1), (n, 1)), axis=1)[:, :_QUERIES]
    tokens = np.empty((n, _LETTERS + 2 * _QUERIES), np.int64)
    tokens[:, :_LETTERS] = letters
    tokens[:, _LETTERS::2] = np.take_along_axis(letters, queries, axis=1)
    tokens[:, _LETTERS + 1 :: 2] = CODES + _CODE[np.take_along_axis(letters, queries + 1, axis=1)]
    mask = np.zeros(tokens.shape, bool)
    mask[:, _LETTERS + 1 :: 2] = True
    return tokens, mask
