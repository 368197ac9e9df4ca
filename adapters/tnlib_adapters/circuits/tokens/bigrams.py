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
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary, vocabulary_of_logits
from tnlib_adapters.reference.embedding import as_token_ids
from tnlib_adapters.result_table import Columns, Table

_CELLS = 1 << 25  # logits in memory at a time: products of 512 rows or more take two thirds of the time of 170 rows
_GROUP = 256  # tokens of which the largest logit is found first
_SHOWN = 12  # tokens listed by repr


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
    """

    tokens: Array
    successors: Array
    probabilities: Array
    vocabulary: Vocabulary

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

    def _printed(self) -> slice:
        return slice(_SHOWN)


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
        (n,), integers, or what a tokenizer returned: the current tokens. None: every token, without additional memory.
        Most of the time is that of one matrix product of vocab^2 d_model multiplications.
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
    successors, probabilities = np.empty((len(chosen), k), np.int64), np.empty((len(chosen), k))
    block = max(1, min(_CELLS // len(words), len(chosen)))
    memory = np.empty((block, len(words)), words.unembed.dtype)
    for start in range(0, len(chosen), block):
        current = chosen[start : start + block]
        logits = _logits(words, current, memory[: len(current)])

        def keep(i: int, j: int, logits: Array = logits, start: int = start) -> None:
            rows = slice(start + i, start + j)
            successors[rows], probabilities[rows] = likeliest(logits[i:j], k)

        run_parallel(keep, split_range(len(logits), thread_count()))
    return Bigrams(chosen, successors, probabilities, words)


def _logits(words: Vocabulary, tokens: Array, out: Array) -> Array:
    x = words.rows(tokens)
    x = x if words.final is None else words.final(x)
    logits = parallel_matmul(x.astype(words.unembed.dtype), words.unembed.T, out)  # token [d] vocab
    if words.bias is not None:
        logits += words.bias.astype(logits.dtype)
    if words.cap is not None:
        logits /= words.cap
        np.tanh(logits, out=logits)
        logits *= words.cap
    return logits


def likeliest(logits: Array, k: int) -> tuple[Array, Array]:
    """Return the tokens of the k largest logits of each row, descending, and their softmax probabilities.

    The largest lie in the k groups of tokens with the largest maxima, so that few are sorted. Exponentials are left out
    of the sum in groups whose maximum is more than log(vocab / eps) below the largest logit: together they are less
    than eps of it. Where embeddings are tied that is most of them, and those that underflow take the longest.
    """
    starts, vocab = np.arange(0, logits.shape[1], _GROUP), logits.shape[1]
    maxima = np.maximum.reduceat(logits, starts, axis=1)
    groups = np.argpartition(-maxima, min(k, len(starts)) - 1, axis=1)[:, :k]
    near = (starts[groups][:, :, None] + np.arange(_GROUP)).reshape(len(logits), -1)
    sizes = np.where(near < vocab, np.take_along_axis(logits, np.minimum(near, vocab - 1), axis=1), -np.inf)
    best = np.argpartition(-sizes, k - 1, axis=1)[:, :k]
    near, sizes = (np.take_along_axis(a, best, axis=1) for a in (near, sizes))
    order = np.argsort(-sizes, axis=1, kind="stable")
    near, sizes = (np.take_along_axis(a, order, axis=1) for a in (near, sizes))
    top, total = sizes[:, :1], np.zeros((len(logits), 1))
    counted = maxima >= top - np.log(vocab / np.finfo(logits.dtype).eps)
    for start, rows in zip(starts, counted.T, strict=True):
        exponentials = np.exp(logits[rows, start : start + _GROUP] - top[rows])
        total[rows] += exponentials.sum(axis=1, keepdims=True, dtype=np.float64)
    return near, np.exp((sizes - top).astype(np.float64)) / total
