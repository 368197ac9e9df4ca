"""Bigrams of the direct path: the successors of each token by embedding and unembedding alone, W_E W_U."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.linalg.threads import parallel_matmul, run_parallel, single_threaded_blas, split_range, thread_count
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.tokens.largest_logits import LargestLogits
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary, vocabulary_of_logits
from tnlib_adapters.reference.embedding import as_token_ids
from tnlib_adapters.reference.layers import Norm, normed
from tnlib_adapters.result_table import Columns, Table

_BLOCK = 6144  # tokens of a block: logits of one block after another are in memory, 144 MiB in float32
_ROWS = 1024  # rows of a block that are scaled and searched at a time
_COPIED = 128  # columns of these that are copied at a time


@dataclass(frozen=True, eq=False, repr=False)
class Bigrams(Table):
    """Most likely successors of each token by the direct path, returned by `bigrams`.

    Parameters
    ----------
    tokens
        (n,), the current tokens.
    successors
        (n, k), the next tokens, in order of descending probability.
    probabilities
        (n, k), softmax probabilities over the whole vocabulary.
    vocabulary
        Token names.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Zero-layer transformers".

    Examples
    --------
    With tied embeddings, the direct path repeats the token:

    >>> import tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = bigrams(llama, [309])
    >>> (
    ...     found.vocabulary.name(309),
    ...     found.vocabulary.name(found.successors[0, 0]),
    ...     f"{found.probabilities[0, 0]:.2f}",
    ... )
    ("' in'", "' in'", '1.00')
    """

    tokens: Array
    successors: Array
    probabilities: Array
    vocabulary: Vocabulary

    _SHOWN = 12

    @property
    def _title(self) -> str:
        return f"Successors of {len(self.tokens):,} tokens by the direct path, with their probabilities"

    def _columns(self, rows: Any) -> Columns:
        name = self.vocabulary.name
        columns: Columns = {"token": [name(token) for token in self.tokens[rows]]}
        for k in range(self.successors.shape[1]):
            columns[f"next_{k + 1}"] = [name(token) for token in self.successors[rows, k]]
            columns[f"p_{k + 1}"] = self.probabilities[rows, k]
        return columns


@accepts_models
@single_threaded_blas
def bigrams(
    model: Checkpoint, tokens: Array | None = None, *, k: int = 5, vocabulary: Vocabulary | None = None
) -> Bigrams:
    """Return the k most likely successors of each token from embedding and unembedding alone.

    The final norm is applied exactly, division included, and so are the bias and the cap of the logits: this is the
    prediction of the model without any layer outputs. Learned positions are omitted.

    Parameters
    ----------
    model
        A checkpoint or transformers model with an unembedding.
    tokens
        (n,), integers, or what a tokenizer returned: the current tokens. None: every token, in blocks. Most of the time
        is that of one matrix product of :math:`v^2 d` multiplications, for v tokens and width d, or half as many if the
        unembedding is the embedding and the final norm an RMSNorm: the product is then symmetric.
    k
        Number of successors.
    vocabulary
        Result of `read_vocabulary(model)`.

    Returns
    -------
    Bigrams
        Printed as a table.

    Raises
    ------
    ArgumentError
        If the model has no unembedding, a token is not in the vocabulary, or k is too large.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Zero-layer transformers".

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = bigrams(model, k=2)
    >>> found.successors.shape
    (1024, 2)
    """
    words = vocabulary_of_logits("bigrams", model, vocabulary)
    if as_count("bigrams", "k", k) > len(words):
        raise ArgumentError(f"bigrams: k must be at most {len(words)}, the count of tokens, got {k}; choose a smaller.")
    chosen = np.arange(len(words)) if tokens is None else as_token_ids("bigrams", tokens, len(words)).ravel()
    norm = _norm_of_symmetric(words) if tokens is None else None
    scales = np.ones(len(chosen)) if norm is None else _inverse_divisors(norm, words.table)
    largest = LargestLogits.start(len(chosen), k, words.unembed.dtype, len(words))
    row_starts, column_starts = (range(0, count, _BLOCK) for count in (len(chosen), len(words)))
    memory = np.empty((min(_BLOCK, len(chosen)), min(_BLOCK, len(words))), words.unembed.dtype)
    for i in row_starts:
        rows = slice(i, min(i + _BLOCK, len(chosen)))
        x = normed(words.final, words.rows(chosen[rows])) if norm is None else words.table[rows] * norm.weight
        x = x.astype(words.unembed.dtype, copy=False)
        for j in column_starts if norm is None else column_starts[i // _BLOCK :]:
            columns = slice(j, min(j + _BLOCK, len(words)))
            products = memory[: len(x), : columns.stop - j]
            parallel_matmul(x, words.unembed[columns].T, products)  # token [d] vocab
            _add(largest, words, rows, products, columns, scales)
            if norm is not None and i < j:
                _add(largest, words, columns, products.T, rows, scales)
    return Bigrams(chosen, largest.tokens, largest.probabilities, words)


def _norm_of_symmetric(words: Vocabulary) -> Norm | None:
    """Return the final norm if the logits are a symmetric matrix over its divisors: half of the products suffice.

    That is W_E diag(g) W_E^T, with the gain g of an RMSNorm, where the unembedding is the embedding; else None.
    """
    final = words.final
    if final is None or final.centred or final.bias is not None or words.norm is not None:
        return None
    return final if words.unembed is words.table else None


def _inverse_divisors(norm: Norm, table: Array) -> Array:
    parts = (table[start : start + _BLOCK] for start in range(0, len(table), _BLOCK))
    return np.concatenate([1 / norm.divisors(part)[:, 0] for part in parts])


def _add(
    largest: LargestLogits, words: Vocabulary, rows: slice, products: Array, columns: slice, scales: Array
) -> None:
    """Add the logits of the tokens `columns` after the tokens `rows`: products times `scales`, with bias and cap."""

    def add(start: int, stop: int) -> None:
        for first in range(start, stop, _ROWS):
            last = min(first + _ROWS, stop)
            tokens = slice(rows.start + first, rows.start + last)
            logits = _scaled(products[first:last], scales[tokens, None].astype(products.dtype))
            if words.bias is not None:
                logits += words.bias[columns].astype(logits.dtype)
            if words.cap is not None:
                logits /= words.cap
                np.tanh(logits, out=logits)
                logits *= words.cap
            largest.add(tokens, logits, columns.start)

    run_parallel(add, split_range(len(products), thread_count()))


def _scaled(a: Array, scales: Array) -> Array:
    """Return a times scales in C order; blocks that stay in cache take a seventh of the time of a transposed array."""
    out = np.empty(a.shape, a.dtype)
    for start in range(0, a.shape[1], _COPIED):
        np.multiply(a[:, start : start + _COPIED], scales, out=out[:, start : start + _COPIED])
    return out
