r"""What heads do, told from their weights alone: no text is run.

Previous token. With the mean token at every position the scores of a head depend on positions alone; the pattern of
those scores gives some weight to the previous one.

Matching. Let s(t, u) be the score of a key made from token u for a query made from token t, centred over u, which is
all that softmax sees. How far the own token stands out is

    mean over t of s(t, t)  /  root mean square of s    =    tr(T X) / sqrt(tr(T Q T^T K))

a number of standard deviations, at most the root of the width of a head. Q, K and X are d_head x d_head: second
moments over tokens of queries, of centred keys, and of the two together, all from the one matrix of second moments of
what the stream holds of tokens. T is the mean over distances of what turns keys where embeddings are rotary.

A head that matches a token with itself attends to duplicates. Induction takes two heads: one, g, that attends to the
previous token and writes what it read, and one, h, that matches its token with what g wrote of the token before: with
keys made by W_V W_O of g and then W_K of h. The score of h is

    max over g in earlier layers of    previous(g) * matching(g, h)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.threads import parallel_matmul, single_threaded_blas
from tnlib_adapters.attention.indices import as_index
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.heads.effective_head import StreamHead, stream_head
from tnlib_adapters.circuits.heads.token_and_position import Apart, as_length, columns, read_apart
from tnlib_adapters.circuits.tokens.embeddings import as_vocabulary
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary
from tnlib_adapters.reference.layers import softmax


@dataclass(frozen=True, eq=False, repr=False)
class WeightScores:
    """What weights say that heads do; made by `weight_scores`.

    Parameters
    ----------
    previous
        (layers, heads): the weight of the previous position in the pattern of the mean token, from 0 to 1.
    duplicate
        (layers, heads): how many standard deviations the own token stands above others.
    matching
        (layers, heads, layers, heads): the same of keys that an earlier head wrote; NaN unless it is earlier.
    induction
        (layers, heads): the largest product of `previous` of a writer and its `matching`; 0 in the first layer.
    chance
        `previous` of a head that attends to everything alike. Of the others it is 0.
    """

    previous: Array
    duplicate: Array
    matching: Array
    induction: Array
    chance: float

    def writer(self, layer: int, head: int) -> tuple[int, int] | None:
        """Return the earlier head that the induction of this one goes through, None where there is none."""
        layer = as_index("WeightScores.writer", "layer", layer, len(self.previous))
        head = as_index("WeightScores.writer", "head", head, self.previous.shape[1])
        products = np.nan_to_num(self.previous[:, :, None, None] * self.matching)[:, :, layer, head]
        at = np.unravel_index(int(products.argmax()), products.shape)
        return (int(at[0]), int(at[1])) if products[at] > 0 else None

    def __repr__(self) -> str:
        lines = [f"WeightScores of {self.previous.size} heads"]
        for name, of in (("previous", self.previous), ("duplicate", self.duplicate), ("induction", self.induction)):
            order = np.argsort(-of, axis=None, kind="stable")[:4]
            at = [divmod(int(k), of.shape[1]) for k in order]
            chance = self.chance if name == "previous" else 0.0
            lines.append(f"  {name:10} chance {chance:.2f}   " + "  ".join(f"{i}.{j} {of[i, j]:.2f}" for i, j in at))
        return "\n".join(lines)


@single_threaded_blas
def weight_scores(
    model: Checkpoint, *, length: int | None = None, vocabulary: Vocabulary | None = None
) -> WeightScores:
    """Return how much every head attends to previous tokens, duplicates and what followed them, by weights alone.

    The stream is taken to hold tokens, positions and what one earlier head wrote; what other layers wrote is left out,
    and so are norms of the stream itself on the way from one head to another.

    Parameters
    ----------
    model
        A checkpoint of a model that reads tokens.
    length
        How many positions a sequence has. None: as many as the model takes, at most 256.
    vocabulary
        What `read_vocabulary(model)` returned.

    Returns
    -------
    WeightScores
        `previous`, `duplicate`, `matching`, `induction`.

    Raises
    ------
    ArgumentError
        If queries and keys are normalised, so that scores are no bilinear form, or the sequence is too long.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Mechanistic theory" of induction.

    Examples
    --------
    >>> import tnlib_adapters
    >>> found = weight_scores(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    >>> bool(found.previous[0, 3] > 0.8), [found.writer(1, head) for head in range(4)]
    (True, [(0, 3), (0, 3), (0, 3), (0, 3)])
    """
    if as_checkpoint("weight_scores", model, "model").attention(0).head_norm is not None:
        raise ArgumentError(
            f"weight_scores: scores of model must be bilinear, but a {model.architecture.model_type} normalises "
            "queries and keys; use repeat_scores, which runs it."
        )
    words = as_vocabulary("weight_scores", model, vocabulary)
    shape = (model.n_layers, model.sizes.n_heads)
    heads = [stream_head("weight_scores", model, *at) for at in np.ndindex(shape)]
    n = as_length("weight_scores", length, words, heads[0].attention)
    moments = words.second_moments(heads[0].norm)
    moved = moments - np.outer(moments[-1], moments[-1])  # around the mean over tokens, which is the last row
    writers = _Writers.of(heads, moved)
    previous, duplicate = np.zeros(shape), np.zeros(shape)
    matching = np.full(shape + shape, np.nan)
    for number, (at, head) in enumerate(zip(np.ndindex(shape), heads, strict=True)):
        apart = read_apart(head, words, n, average=True)
        previous[at] = np.diagonal(position_pattern(apart), -1).mean()
        query, key = columns(head.attention, "Q"), columns(head.attention, "K")
        turn = _mean_turn(apart)
        asked = turn @ (query.T @ moments @ query) @ turn.T  # of q T^T: r [r] [d~] [d~] [r] r
        towards = turn @ query.T @ moved  # r [r] [d~] d~
        rms = float(np.sqrt(max((asked * (key.T @ moved @ key)).sum(), 0.0)))
        duplicate[at] = np.trace(towards @ key) / rms if rms else 0.0
        if at[0]:
            found = writers.matching(asked, towards, key[:-1], number // shape[1] * shape[1])
            matching[: at[0], :, *at] = found.reshape(at[0], -1)
    products = np.nan_to_num(previous[:, :, None, None] * matching, nan=0.0)
    seen = heads[0].attention.mask(n)
    return WeightScores(
        previous=previous,
        duplicate=duplicate,
        matching=matching,
        induction=np.maximum(products, 0).max(axis=(0, 1)),
        chance=float((1 / seen.sum(axis=1)[1:]).mean()),
    )


def position_pattern(found: Apart) -> Array:
    """Return the pattern (n, n) of a head where the mean token stands at every position."""
    layer, n = found.attention, found.n
    seen, i = layer.mask(n), np.arange(n)
    scores = np.empty((n, n))
    for query in i:
        keys = found.turned(found.keys + found.keys_at, query - i)  # j dh
        scores[query] = keys @ (found.queries[0] + found.queries_at[query]) - found.slope() * (query - i)  # j [dh]
    scores *= layer.scale
    capped = scores if layer.softcap is None else layer.softcap * np.tanh(scores / layer.softcap)
    return softmax(np.where(seen, capped, -np.inf))


@dataclass(frozen=True, eq=False)
class _Writers:
    """What all heads write for a token: it is read along `reads` (d~, head, r) and written along `writes` (head, r, d).

    `moments` (head, r, r) are the second moments of what is read, around its mean over tokens.
    """

    reads: Array
    writes: Array
    moments: Array

    @classmethod
    def of(cls, heads: list[StreamHead], moved: Array) -> _Writers:
        """Return what these heads are; `moved` (d~, d~) are second moments of what is read, around its mean."""
        both = [head.attention.ov(0) for head in heads]
        reads = np.stack([ov.left for ov in both], axis=1)
        own = np.stack([ov.left.T @ moved @ ov.left for ov in both])  # head r [d~] [d~] r
        return cls(reads, np.stack([ov.right[:, :-1] for ov in both]), own)

    def matching(self, asked: Array, towards: Array, key: Array, count: int) -> Array:
        """Return how far the own token stands out for keys that the first `count` heads wrote, (count,)."""
        r = self.reads.shape[2]
        written = parallel_matmul(self.writes[:count].reshape(-1, len(key)), key).reshape(count, r, -1)  # head r [d] r'
        met = parallel_matmul(towards, self.reads[:, :count].reshape(len(self.reads), -1))  # r' [d~] (head r)
        own = np.einsum("khr,hrk->h", met.reshape(-1, count, r), written)  # h [r k]
        keys = written.transpose(0, 2, 1) @ self.moments[:count] @ written  # h r' [r] [r] r'
        rms = np.sqrt(np.maximum(np.einsum("hab,ba->h", keys, asked), 0))
        return np.asarray(np.divide(own, rms, out=np.zeros(count), where=rms > 0))


def _mean_turn(found: Apart) -> Array:
    """Return the mean over all distances but 0 of what turns keys as rows, k T."""
    turns = found.turns(np.arange(1, found.n))
    return np.eye(found.queries.shape[1]) if turns is None else np.asarray(turns.mean(axis=0))
