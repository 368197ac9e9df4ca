r"""How much of a head's scores is a matter of content, and how much of position.

Softmax sees how the scores of one query vary over its keys. Let the tokens be drawn at random, one for the query and,
independently, one for every key; k_tj is the key of token t at position j as query i meets it, turned by the distance
where embeddings are rotary. Over t and the n_i positions that i sees, the score q . k splits as any function of two
variables does into its means and what they leave,

    q . (m_j - m)               position: the mean over tokens
    q . (k~_t - m)              token:    the mean over positions
    q . (k_tj - k~_t - m_j + m) both:     nothing where positions are learned; where embeddings are rotary, how fast
                                          the score of a token fades or turns with the distance

whose variances add up. The query is a sum of three: what all queries have in common, what depends on its token, and
what on its position; the share of one is the mean of (its part of the score) * (the whole score), so that the nine
shares add up to 1. A share of a query's part can be negative, where it works against the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import to_numpy
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.heads.effective_head import stream_head
from tnlib_adapters.circuits.heads.token_and_position import Apart, as_length, read_apart
from tnlib_adapters.circuits.tokens.embeddings import as_vocabulary
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary

QUERY = ("common", "token", "position")
KEY = ("token", "position", "both")


@dataclass(frozen=True, eq=False, repr=False)
class ScoreShares:
    """Shares of the variance of a head's scores over its keys; made by `score_shares`.

    Parameters
    ----------
    shares
        (3, 3), of sum 1: rows are parts of the query (common to all, its token, its position), columns what the score
        depends on at the key (its token, its position, both together).
    deviation
        The standard deviation of the scores, scale included: how far from uniform the pattern can be.
    notes
        Sentences on what is left out.
    """

    shares: Array
    deviation: float
    notes: tuple[str, ...]

    @property
    def content(self) -> float:
        """The share of the key's token."""
        return float(self.shares[:, 0].sum())

    @property
    def position(self) -> float:
        """The share of the key's position."""
        return float(self.shares[:, 1].sum())

    def __repr__(self) -> str:
        head = "  query \\ key" + "".join(f"{k:>10}" for k in KEY)
        rows = zip(QUERY, self.shares, strict=True)
        lines = [f"ScoreShares, scores vary by {self.deviation:.3g}", head]
        lines += [f"  {name:<11}" + "".join(f"{share:>10.3f}" for share in row) for name, row in rows]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


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
    """Return how much of a head's scores content and position decide, from its weights.

    The stream is taken to hold tokens and learned positions alone: in the first layer that is all of it, in later ones
    the direct path.

    Parameters
    ----------
    model
        A checkpoint of a model that reads tokens.
    layer, head
        Counted from 0.
    tokens
        (n,), integers: which tokens to draw from, each as often as it occurs. None: every token once.
    length
        How many positions a sequence has. None: as many as the model takes, at most 256.
    vocabulary
        What `read_vocabulary(model)` returned.

    Returns
    -------
    ScoreShares
        `shares`, `content`, `position`; closed sums, nothing is drawn. A soft cap of the scores is left out.

    Raises
    ------
    ArgumentError
        If there is no such head, a token is not in the vocabulary, or the sequence is too long.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = score_shares(model, 0, 3)                                          # the previous-token head
    >>> found.position > 0.99
    True
    """
    head_found = stream_head("score_shares", model, layer, head)
    words = as_vocabulary("score_shares", model, vocabulary)
    n = as_length("score_shares", length, words, head_found.attention)
    weights = _weights(tokens, len(words))
    table, total = _table(read_apart(head_found, words, n), weights)
    notes = list(head_found.notes)
    if head_found.attention.softcap is not None:
        notes.append("the soft cap of the scores is left out")
    deviation = abs(head_found.attention.scale) * float(np.sqrt(max(total, 0.0)))
    return ScoreShares(table / total if total > 0 else np.zeros((3, 3)), deviation, tuple(notes))


def _table(found: Apart, weights: Array) -> tuple[Array, float]:
    """Return the nine products of parts, averaged over queries, and their sum.

    One more coordinate, 1 for every query, carries what ALiBi takes off.
    """
    q, q_moved = _moments(_with(found.queries, 1.0), weights)
    k, k_moved = _moments(_with(found.keys, 0.0), weights)
    q_at = _with(found.queries_at, 0.0)
    common, q_at = q + q_at.mean(axis=0), q_at - q_at.mean(axis=0)
    seen, turning = found.attention.mask(found.n), _Turning.of(found, k_moved)
    table = np.zeros((3, 3))
    for i in range(found.n):
        j = np.flatnonzero(seen[i])  # neighbours, all of them
        means = _with(found.turned(k[:-1] + found.keys_at[j], i - j), -found.slope() * (i - j))  # j r
        drift = means - means.mean(axis=0)
        by_token, either = turning.over(i - j[-1], i - j[0])
        by_key = np.stack([by_token, drift.T @ drift / len(j), either - by_token])  # key r [j] r
        whole = common + q_at[i]
        by_query = np.stack([np.outer(common, whole), q_moved, np.outer(q_at[i], whole)])  # query r r
        table += np.einsum("qab,kab->qk", by_query, by_key)  # query key [r r]
    table /= found.n
    return table, float(table.sum())


@dataclass(frozen=True, eq=False)
class _Turning:
    """Sums over distances of what turns keys, and of the covariance of turned keys; None where nothing turns."""

    covariance: Array
    turns: Array | None
    turned: Array | None
    first: int

    @classmethod
    def of(cls, found: Apart, covariance: Array) -> _Turning:
        """Return the sums for one head, over all distances that it sees."""
        first = 0 if found.attention.causal else 1 - found.n
        inner = found.turns(np.arange(first, found.n))
        if inner is None:
            return cls(covariance, None, None, first)
        turns = np.zeros((len(inner), *covariance.shape))
        turns[:, :-1, :-1] = inner
        turned = turns.transpose(0, 2, 1) @ covariance @ turns  # D r [r] [r] r
        return cls(covariance, np.cumsum(turns, axis=0), np.cumsum(turned, axis=0), first)

    def over(self, low: int, high: int) -> tuple[Array, Array]:
        """Return the covariance of the mean turned key, and the mean covariance, over distances low ... high."""
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
    """Return mean and covariance of rows, each as often as its weight says."""
    mean = weights @ rows  # [token] r
    moved = rows - mean
    return mean, (moved * weights[:, None]).T @ moved  # r [token] r


def _weights(tokens: Array | None, vocab: int) -> Array:
    if tokens is None:
        return np.full(vocab, 1 / vocab)
    a = np.atleast_1d(to_numpy("score_shares", "tokens", tokens)).ravel()
    numbers = bool(a.size) and a.dtype.kind in "iu"
    if not numbers or a.min() < 0 or a.max() >= vocab:
        raise ArgumentError(
            f"score_shares: tokens must be integers from 0 to {vocab - 1}, got {a.dtype} of shape {a.shape}"
            f"{f' from {a.min()} to {a.max()}' if numbers else ''}; use the tokenizer that belongs to the model."
        )
    counts = np.bincount(a.astype(np.int64), minlength=vocab)
    return np.asarray(counts / counts.sum())
