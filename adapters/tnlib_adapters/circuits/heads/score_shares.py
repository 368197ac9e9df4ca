r"""Variance decomposition of attention scores into content and position.

Softmax depends only on the variation of the scores of a query over its keys. Let tokens be independent random
variables, one for the query and one for every key. k_tj is the key of token t at position j as seen from query i,
rotated by the distance where embeddings are rotary. Over t and the n_i keys of query i, the score q . k has a two-way
ANOVA decomposition with mean m, token means k~_t and position means m_j:

    q . (m_j - m)               position
    q . (k~_t - m)              token
    q . (k_tj - k~_t - m_j + m) interaction: zero for learned positions; for rotary embeddings, the decay or
                                rotation of a token's score with the distance

The variances of the three add up. The query is a sum of three parts: common to all queries, token, and position. The
share of a part is the mean of (its part of the score) * (the score), so that the nine shares add up to 1. A share can
be negative where parts of the query cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.effective_head import (
    TokenPositionParts,
    as_length,
    key_turns,
    split_queries_and_keys,
    stream_head,
)
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary, as_vocabulary
from tnlib_adapters.reference.embedding import as_token_ids
from tnlib_adapters.result_table import Columns, Table

QUERY = ("common", "token", "position")
KEY = ("token", "position", "both")


@dataclass(frozen=True, eq=False, repr=False)
class ScoreShares(Table):
    """Shares of the variance of a head's scores over its keys, returned by `score_shares`.

    Parameters
    ----------
    shares
        (3, 3), sum 1: rows are parts of the query (common, token, position), columns are parts of the key (token,
        position, interaction).
    deviation
        Standard deviation of the scores, scale included; large values allow patterns far from uniform.
    notes
        Sentences on omitted parts of the model.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = score_shares(model, 1, 2)
    >>> found.shares.sum(axis=0).round(1)  # by token, position and interaction of the key
    array([0.3, 0.7, 0. ])
    """

    shares: Array
    deviation: float
    notes: tuple[str, ...]

    @property
    def content(self) -> float:
        """Share of the key's token."""
        return float(self.shares[:, 0].sum())

    @property
    def position(self) -> float:
        """Share of the key's position."""
        return float(self.shares[:, 1].sum())

    @property
    def _title(self) -> str:
        return f"ScoreShares, scores vary by {self.deviation:.3g}; parts of the query as rows, of the key as columns"

    def _columns(self, rows: Any) -> Columns:
        return {"query": QUERY[rows]} | dict(zip(KEY, self.shares[rows].T, strict=True))


@accepts_models
@single_threaded_blas
def score_shares(
    model: Checkpoint,
    layer: int,
    head: int,
    *,
    tokens: Array | None = None,
    length: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> ScoreShares:
    """Return the shares of content and position in the score variance of a head, from its weights.

    The stream is assumed to hold token and learned position embeddings only: exact in the first layer, the direct path
    in later ones.

    Parameters
    ----------
    model
        A checkpoint or transformers model that reads tokens.
    layer, head
        Indices, from 0.
    tokens
        (n,), integers: empirical distribution of the tokens. None: uniform over the vocabulary.
    length
        Sequence length. None: the context of the model, at most 256.
    vocabulary
        Result of `read_vocabulary(model)`.

    Returns
    -------
    ScoreShares
        `shares`, `content`, `position`; exact sums without sampling. A soft cap of the scores is ignored.

    Raises
    ------
    ArgumentError
        If there is no such head, a token is not in the vocabulary, or the sequence is too long.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = score_shares(model, 0, 3)  # the previous-token head
    >>> round(found.position, 3)
    0.999
    """
    head_found = stream_head("score_shares", model, layer, head)
    words = as_vocabulary("score_shares", model, vocabulary)
    n = as_length("score_shares", length, words, head_found.attention)
    weights = _weights(tokens, len(words))
    table, total = _table(split_queries_and_keys(head_found, words, n), weights)
    notes = list(head_found.notes)
    if head_found.attention.softcap is not None:
        notes.append("the soft cap of the scores is left out")
    deviation = abs(head_found.attention.scale) * float(np.sqrt(max(total, 0.0)))
    return ScoreShares(table / total if total > 0 else np.zeros((3, 3)), deviation, tuple(notes))


def _table(parts: TokenPositionParts, weights: Array) -> tuple[Array, float]:
    """Return the nine products of query and key parts, averaged over queries, and their sum.

    An additional coordinate, 1 for every query, holds the offset of ALiBi or a relative bias.
    """
    q, q_moved = _moments(_with(parts.queries, 1.0), weights)
    k, k_moved = _moments(_with(parts.keys, 0.0), weights)
    q_at = _with(parts.queries_at, 0.0)
    common, q_at = q + q_at.mean(axis=0), q_at - q_at.mean(axis=0)
    visible, turning = parts.attention.mask(parts.n), _Turning.of(parts, k_moved)
    table = np.zeros((3, 3))
    for i in range(parts.n):
        j = np.flatnonzero(visible[i])  # all keys of query i
        means = _with(parts.turned(k[:-1] + parts.keys_at[j], i - j), parts.offsets(i - j))  # j r
        drift = means - means.mean(axis=0)
        by_token, either = turning.over(i - j[-1], i - j[0])
        by_key = np.stack([by_token, drift.T @ drift / len(j), either - by_token])  # key r [j] r
        query = common + q_at[i]
        by_query = np.stack([np.outer(common, query), q_moved, np.outer(q_at[i], query)])  # query r r
        table += np.einsum("qab,kab->qk", by_query, by_key)  # query key [r r]
    table /= parts.n
    return table, float(table.sum())


@dataclass(frozen=True, eq=False)
class _Turning:
    """Cumulative sums over distances of key rotations and rotated key covariances; None without rotary embeddings."""

    covariance: Array
    turns: Array | None
    turned: Array | None
    first: int

    @classmethod
    def of(cls, parts: TokenPositionParts, covariance: Array) -> _Turning:
        """Return the sums for one head, over all its distances."""
        first = 0 if parts.attention.causal else 1 - parts.n
        inner = key_turns(parts.attention, np.arange(first, parts.n))
        if inner is None:
            return cls(covariance, None, None, first)
        turns = np.zeros((len(inner), *covariance.shape))
        turns[:, :-1, :-1] = inner
        turned = turns.transpose(0, 2, 1) @ covariance @ turns  # D r [r] [r] r
        return cls(covariance, np.cumsum(turns, axis=0), np.cumsum(turned, axis=0), first)

    def over(self, low: int, high: int) -> tuple[Array, Array]:
        """Return the covariance of the mean rotated key, and the mean covariance, over distances low ... high."""
        if self.turns is None or self.turned is None:
            return self.covariance, self.covariance
        turn, either = (self._mean(a, low - self.first, high - self.first) for a in (self.turns, self.turned))
        return turn.T @ self.covariance @ turn, either

    @staticmethod
    def _mean(sums: Array, low: int, high: int) -> Array:
        return np.asarray((sums[high] - (sums[low - 1] if low else 0)) / (high - low + 1))


def _with(rows: Array, last: Array | float) -> Array:
    """Append a coordinate to every row."""
    return np.column_stack([rows, np.broadcast_to(last, len(rows))])


def _moments(rows: Array, weights: Array) -> tuple[Array, Array]:
    """Return weighted mean and covariance of rows."""
    mean = weights @ rows  # [token] r
    moved = rows - mean
    return mean, (moved * weights[:, None]).T @ moved  # r [token] r


def _weights(tokens: Array | None, vocab: int) -> Array:
    if tokens is None:
        return np.full(vocab, 1 / vocab)
    counts = np.bincount(as_token_ids("score_shares", tokens, vocab).ravel().astype(np.int64), minlength=vocab)
    return np.asarray(counts / counts.sum())
