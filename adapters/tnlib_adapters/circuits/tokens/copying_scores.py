r"""Copying scores from the eigenvalues of the circuit C = W_E OV W_U from tokens to logits.

C is (vocab, vocab) with rank at most d_head. With R = W_E W_V (tokens, d_head) and W = W_O W_U (d_head, tokens), C = R
W has the same nonzero eigenvalues as W R (d_head, d_head). A head that raises the logits of the tokens it attends to
has positive eigenvalues. The copying score is

    sum_k lambda_k / sum_k |lambda_k|  =  tr(W R) / sum_k |lambda_k|,    from -1 to 1.

W_E is the head's input for each token alone. The mean over tokens is subtracted from W_U: softmax is invariant to a
vector added to every column of the unembedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng
from tnlib.linalg.threads import parallel_matmul, single_threaded_blas
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.heads.effective_head import StreamHead, stream_head
from tnlib_adapters.circuits.tokens.embeddings import as_vocabulary
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary

_CELLS = 1 << 23  # entries of the circuit in memory at a time
_BLOCK = 1 << 12  # tokens per block converted to float64


@dataclass(frozen=True, eq=False, repr=False)
class Copying:
    """Copying scores of a head, returned by `copying`.

    Parameters
    ----------
    eigenvalues
        (d_head,), complex, descending modulus: all eigenvalues of the circuit that can differ from zero.
    ranks
        (tokens,): number of other logits that a token raises at least as much as its own; 0 where it copies.
    vocab
        Vocabulary size; larger than the size of `ranks` if these are a sample.
    """

    eigenvalues: Array
    ranks: Array
    vocab: int

    @property
    def score(self) -> float:
        """Sum of the eigenvalues over the sum of their moduli: 1 for a copying head, 0 by chance."""
        return _score(self.eigenvalues)

    def accuracy(self, k: int = 1) -> float:
        """Return the fraction of tokens whose own logit is among the k that they raise most; chance is k / vocab."""
        return float((self.ranks < as_count("Copying.accuracy", "k", k)).mean())

    def __repr__(self) -> str:
        sampled = "" if len(self.ranks) == self.vocab else f" of {len(self.ranks):,} tokens"
        return f"Copying(score {self.score:.3f}, top 1 {self.accuracy(1):.3f}, top 5 {self.accuracy(5):.3f}{sampled})"


@single_threaded_blas
def copying(
    model: Checkpoint,
    layer: int,
    head: int,
    *,
    vocabulary: Vocabulary | None = None,
    sample: int | None = None,
    rng: int | np.random.Generator = 0,
) -> Copying:
    """Return copying scores of a head: whether its output for a token raises the logit of that token.

    Parameters
    ----------
    model
        A checkpoint with an unembedding.
    layer, head
        Indices, from 0.
    vocabulary
        Result of `read_vocabulary(model)`; reuse it for several heads.
    sample
        Number of tokens sampled for the ranks; None: all, which takes seconds per head for GPT-2. Eigenvalues always
        use all tokens. Memory grows linearly with the vocabulary.
    rng
        Seed or generator for the sample.

    Returns
    -------
    Copying
        `eigenvalues`, `score`, `accuracy(k)`.

    Raises
    ------
    ArgumentError
        If there is no such head, or the model has no unembedding.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Copying / primitive in-context
    learning".

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> copying(model, 1, 2).score > 0.99, copying(model, 0, 3).score > 0  # an induction head, a previous-token head
    (True, False)
    """
    effective = stream_head("copying", model, layer, head)
    words = _ends_in_logits("copying", model, vocabulary)
    chosen = np.arange(len(words))
    if sample is not None and as_count("copying", "sample", sample) < len(words):
        chosen = np.sort(as_rng("copying", rng).choice(len(words), sample, replace=False))
    return circuit_copying(effective, words, chosen)


@single_threaded_blas
def copying_scores(model: Checkpoint, *, vocabulary: Vocabulary | None = None) -> Array:
    """Return the copying scores of all heads, (layers, heads), from one pass over the vocabulary.

    Parameters
    ----------
    model
        A checkpoint with an unembedding.
    vocabulary
        Result of `read_vocabulary(model)`.

    Returns
    -------
    ndarray
        `copying(model, layer, head).score` of each. All heads share one matrix (d_model, d_model + 1), the sum over
        tokens of unembedding times input.

    Raises
    ------
    ArgumentError
        If the model has no unembedding.

    Examples
    --------
    >>> import tnlib_adapters
    >>> copying_scores(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())).round(2)[1]
    array([1., 1., 1., 1.])
    """
    words = _ends_in_logits("copying_scores", as_checkpoint("copying_scores", model, "model"), vocabulary)
    scores = np.zeros((model.n_layers, model.sizes.n_heads))
    between = None
    for at in np.ndindex(scores.shape):
        head = stream_head("copying_scores", model, *at)
        ov = head.attention.ov(0)
        between = words.between(head.norm) if between is None else between  # all norms have the same divisors
        scores[at] = _score(np.linalg.eigvals(ov.right[:, :-1] @ between @ ov.left))  # dh [d] [d~] dh
    return scores


def circuit_copying(found: StreamHead, words: Vocabulary, chosen: Array) -> Copying:
    """Return the eigenvalues of a head's circuit, and the ranks of the chosen tokens."""
    ov = found.attention.ov(0)
    reads = words.read(ov.left, found.norm)  # vocab dh
    writes = words.write(ov.right[:, :-1])  # dh vocab
    values = np.linalg.eigvals(_product(writes, reads))
    order = np.lexsort([-values.imag, -np.abs(values)])
    return Copying(values[order].astype(np.complex128), _ranks(reads, writes, chosen), len(words))


def _product(writes: Array, reads: Array) -> Array:
    """Return writes @ reads over all tokens, summed in float64."""
    total = np.zeros((len(writes), reads.shape[1]))
    for start in range(0, len(reads), _BLOCK):
        part = slice(start, start + _BLOCK)
        total += writes[:, part].astype(np.float64) @ reads[part].astype(np.float64)  # dh [token] dh
    return total


def _ranks(reads: Array, writes: Array, chosen: Array) -> Array:
    """Return for every chosen token the number of other logits at least as large as its own, block by block."""
    ranks = np.empty(len(chosen), np.int64)
    block = max(1, _CELLS // writes.shape[1])
    for start in range(0, len(chosen), block):
        tokens = chosen[start : start + block]
        logits = parallel_matmul(reads[tokens], writes)  # token [dh] vocab
        own_logits = logits[np.arange(len(tokens)), tokens]
        ranks[start : start + block] = np.count_nonzero(logits >= own_logits[:, None], axis=1) - 1
    return ranks


def _score(eigenvalues: Array) -> float:
    sizes = np.abs(eigenvalues)
    return float(eigenvalues.real.sum() / sizes.sum()) if sizes.any() else 0.0


def _ends_in_logits(function: str, model: Checkpoint, vocabulary: Vocabulary | None) -> Vocabulary:
    words = as_vocabulary(function, model, vocabulary)
    if not words.ends_in_logits:
        raise ArgumentError(
            f"{function}: model must have an unembedding, got a {model.architecture.model_type}, which ends in hidden "
            "states; load one with a head for tokens."
        )
    return words
