"""Bigrams of the direct path: the successors of each token by embedding and unembedding alone, W_E W_U."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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

_BLOCK = 6144  # tokens of a block: logits of one block after another are in memory, 144 MiB in float32
_ROWS = 1024  # rows of a block that are scaled and searched at a time
_GROUP = 128  # logits of which the largest is found first
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
        (n,), integers, or what a tokenizer returned: the current tokens. None: every token, in blocks. Most of the time
        is that of one matrix product of vocab^2 d_model multiplications, or half as many if the unembedding is the
        embedding and the final norm an RMSNorm: the product is then symmetric.
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
    scales = None if tokens is not None else _scales_of_symmetric(words)
    found = _Likeliest.start(len(chosen), k, words.unembed.dtype, len(words))
    memory = np.empty((min(_BLOCK, len(chosen)), min(_BLOCK, len(words))), words.unembed.dtype)
    blocks: Iterable[tuple[int, int]] = itertools.product(range(0, len(chosen), _BLOCK), range(0, len(words), _BLOCK))
    if scales is not None:  # where a token is its own successor, the others are smaller and quickly left out
        blocks = sorted(((i, j) for i, j in blocks if i <= j), key=lambda block: block[1] - block[0])
    x, first = np.empty(0), -1
    for i, j in blocks:
        rows, columns = slice(i, min(i + _BLOCK, len(chosen))), slice(j, min(j + _BLOCK, len(words)))
        if i != first:
            x, first = _inputs(words, chosen[rows], scales), i
        products = memory[: rows.stop - i, : columns.stop - j]
        parallel_matmul(x, words.unembed[columns].T, products)  # token [d] vocab
        if scales is not None and i < j:
            _add(found, words, columns, products.T, rows, scales)
        _add(found, words, rows, products, columns, scales)
    return Bigrams(chosen, found.tokens, found.probabilities, words)


def _scales_of_symmetric(words: Vocabulary) -> Array | None:
    """Return (vocab,) the scales s of logits s_i S_ij with a symmetric S, or None: half of the products is S.

    They have this form where the unembedding is the embedding and nothing is added to it: S = W_E diag(g) W_E^T with
    the gain g of an RMSNorm, and s the inverse of its divisors.
    """
    final, table = words.final, words.unembed
    if table is not words.table or words.norm is not None or final is None or final.centred or final.bias is not None:
        return None
    parts = (table[start : start + _BLOCK] for start in range(0, len(table), _BLOCK))
    return np.concatenate([1 / final.divisors(part)[:, 0] for part in parts])


def _inputs(words: Vocabulary, tokens: Array, scales: Array | None) -> Array:
    """Return what the unembedding reads for tokens, (n, d_model); with scales, before the division of the norm."""
    if words.final is None:
        x = words.rows(tokens)
    else:
        x = words.final(words.rows(tokens)) if scales is None else words.table[tokens] * words.final.weight
    return x.astype(words.unembed.dtype)


def _add(
    found: _Likeliest, words: Vocabulary, rows: slice, products: Array, columns: slice, scales: Array | None
) -> None:
    """Add logits of the tokens `columns` after the tokens `rows`, from products that are overwritten if in C order."""

    def keep(start: int, stop: int) -> None:
        for first in range(start, stop, _ROWS):
            part = slice(first, min(first + _ROWS, stop))
            tokens = slice(rows.start + part.start, rows.start + part.stop)
            logits = _in_c_order(products[part])
            if scales is not None:
                logits *= scales[tokens, None].astype(logits.dtype)
            if words.bias is not None:
                logits += words.bias[columns].astype(logits.dtype)
            if words.cap is not None:
                logits /= words.cap
                np.tanh(logits, out=logits)
                logits *= words.cap
            found.add(tokens, logits, columns.start)

    run_parallel(keep, split_range(len(products), thread_count()))


def _in_c_order(a: Array) -> Array:
    """Return a in C order; a transposed array is copied by blocks that stay in cache, seven times as fast."""
    if a.flags.c_contiguous or a.strides[1] == a.itemsize:
        return a
    out = np.empty(a.shape, a.dtype)
    for start in range(0, a.shape[1], 128):
        out[:, start : start + 128] = a[:, start : start + 128]
    return out


def likeliest(logits: Array, k: int) -> tuple[Array, Array]:
    """Return the tokens of the k largest logits of each row, descending, and their softmax probabilities."""
    found = _Likeliest.start(len(logits), k, logits.dtype, logits.shape[1])
    found.add(slice(None), logits, 0)
    return found.tokens, found.probabilities


@dataclass(frozen=True, eq=False)
class _Likeliest:
    """The k largest logits of each row so far (n, k), descending, and the sum of exponentials (n,), from blocks.

    Logits more than `negligible`, log(vocab / eps), below the largest are together less than eps of the sum: groups of
    only such logits are left out, and the others are raised to that bound. Where embeddings are tied that is most of
    them, and exponentials that underflow take the longest.
    """

    tokens: Array
    logits: Array
    totals: Array
    negligible: Array

    @classmethod
    def start(cls, n: int, k: int, dtype: Any, vocab: int) -> _Likeliest:
        """Return a state without logits."""
        negligible = np.log(vocab / np.finfo(dtype).eps).astype(dtype)
        return cls(np.zeros((n, k), np.int64), np.full((n, k), -np.inf, dtype), np.zeros(n), negligible)

    @property
    def probabilities(self) -> Array:
        """Softmax probabilities of the largest, (n, k)."""
        return np.exp((self.logits - self.logits[:, :1]).astype(np.float64)) / self.totals[:, None]

    def add(self, rows: slice, logits: Array, first: int) -> None:
        """Add the logits (rows, m) of tokens first, first + 1, ..."""
        starts, before = np.arange(0, logits.shape[1], _GROUP), self.logits[rows, 0].copy()
        maxima = np.maximum.reduceat(logits, starts, axis=1)
        self._keep_largest(np.arange(len(self.logits))[rows], logits, maxima, first)
        top = self.logits[rows, :1]
        totals = self.totals[rows]
        totals *= np.exp((before - top[:, 0]).astype(np.float64))
        counted = maxima >= top - self.negligible
        for start, some in zip(starts, counted.T, strict=True):
            exponentials = logits[some, start : start + _GROUP]
            exponentials -= top[some]
            np.exp(np.maximum(exponentials, -self.negligible, out=exponentials), out=exponentials)
            totals[some] += exponentials.sum(axis=1, dtype=np.float64)

    def _keep_largest(self, rows: Array, logits: Array, maxima: Array, first: int) -> None:
        """Merge the k largest: they lie in the k groups with the largest maxima, so that few logits are sorted."""
        k, m = self.logits.shape[1], logits.shape[1]
        n_larger = np.minimum((maxima > self.logits[rows, -1:]).sum(axis=1), k)
        for n_groups in np.unique(n_larger[n_larger > 0]):
            some = np.flatnonzero(n_larger == n_groups)
            groups = np.argpartition(-maxima[some], n_groups - 1, axis=1)[:, :n_groups]
            near = (groups[:, :, None] * _GROUP + np.arange(_GROUP)).reshape(len(some), -1)
            sizes = np.where(near < m, logits[some[:, None], np.minimum(near, m - 1)], -np.inf)
            near = np.concatenate([self.tokens[rows[some]], first + near], axis=1)
            sizes = np.concatenate([self.logits[rows[some]], sizes], axis=1)
            for chosen in (np.argpartition(-sizes, k - 1, axis=1)[:, :k], None):
                order = np.argsort(-sizes, axis=1, kind="stable") if chosen is None else chosen
                near, sizes = (np.take_along_axis(a, order, axis=1) for a in (near, sizes))
            self.tokens[rows[some]], self.logits[rows[some]] = near, sizes
