"""Largest logits and their softmax probabilities, from one block of the vocabulary after another (online softmax)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tnlib._typing import Array

_GROUP = 128  # logits of which the largest is found first


def largest_logits(logits: Array, k: int) -> tuple[Array, Array]:
    """Return the tokens of the k largest logits of each row (n, k), descending, and their softmax probabilities."""
    largest = LargestLogits.start(len(logits), k, logits.dtype, logits.shape[1])
    largest.add(slice(0, len(logits)), logits, 0)
    return largest.tokens, largest.probabilities


@dataclass(frozen=True, eq=False)
class LargestLogits:
    """The k largest logits of n rows so far, descending, their tokens (n, k), and the sums of exponentials (n,).

    Exponentials are relative to the largest logit (M. Milakov, N. Gimelshein, "Online normalizer calculation for
    softmax", 2018). Logits more than `negligible`, log(vocab / eps), below it are together less than eps of the sum:
    groups of only such logits are left out, and the others are raised to that bound, since exponentials that underflow
    take the longest. Where embeddings are tied that is most of them.
    """

    tokens: Array
    logits: Array
    sums: Array
    negligible: Array

    @classmethod
    def start(cls, n: int, k: int, dtype: npt.DTypeLike, vocab: int) -> LargestLogits:
        """Return a state without logits."""
        negligible = np.log(vocab / np.finfo(dtype).eps).astype(dtype)
        return cls(np.zeros((n, k), np.int64), np.full((n, k), -np.inf, dtype), np.zeros(n), negligible)

    @property
    def probabilities(self) -> Array:
        """Softmax probabilities of the largest, (n, k)."""
        return np.exp((self.logits - self.logits[:, :1]).astype(np.float64)) / self.sums[:, None]

    def add(self, rows: slice, logits: Array, first: int) -> None:
        """Add the logits (rows, m) of tokens first, first + 1, ..."""
        starts, top_before = range(0, logits.shape[1], _GROUP), self.logits[rows, 0].copy()
        maxima = np.maximum.reduceat(logits, starts, axis=1)
        self._merge(np.arange(rows.start, rows.stop), logits, maxima, first)
        top, sums = self.logits[rows, :1], self.sums[rows]
        sums *= np.exp((top_before - top[:, 0]).astype(np.float64))
        counted = maxima >= top - self.negligible
        for start, some in zip(starts, counted.T, strict=True):
            exponentials = logits[some, start : start + _GROUP]
            exponentials -= top[some]
            np.exp(np.maximum(exponentials, -self.negligible, out=exponentials), out=exponentials)
            sums[some] += exponentials.sum(axis=1, dtype=np.float64)

    def _merge(self, rows: Array, logits: Array, maxima: Array, first: int) -> None:
        """Merge the k largest of new logits: they lie in the k groups with the largest maxima, so few are sorted.

        Of these, only groups with a maximum above the smallest so far matter: rows with equally many go together.
        """
        k, m = self.logits.shape[1], logits.shape[1]
        n_larger = np.minimum((maxima > self.logits[rows, -1:]).sum(axis=1), k)
        for n_groups in np.unique(n_larger[n_larger > 0]):
            some = np.flatnonzero(n_larger == n_groups)
            groups = np.argpartition(-maxima[some], n_groups - 1, axis=1)[:, :n_groups]
            columns = (groups[:, :, None] * _GROUP + np.arange(_GROUP)).reshape(len(some), -1)
            new = np.where(columns < m, logits[some[:, None], np.minimum(columns, m - 1)], -np.inf)
            merged = np.concatenate([self.logits[rows[some]], new], axis=1)
            tokens = np.concatenate([self.tokens[rows[some]], first + columns], axis=1)
            best = np.argpartition(-merged, k - 1, axis=1)[:, :k]
            order = np.argsort(-np.take_along_axis(merged, best, axis=1), axis=1, kind="stable")
            best = np.take_along_axis(best, order, axis=1)
            self.logits[rows[some]] = np.take_along_axis(merged, best, axis=1)
            self.tokens[rows[some]] = np.take_along_axis(tokens, best, axis=1)
