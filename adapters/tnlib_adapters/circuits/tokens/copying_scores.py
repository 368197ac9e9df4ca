r"""Whether a head copies: the circuit C = W_E OV W_U from tokens to logits, through its small inner dimension.

C has one row and one column per token and rank at most d_head. Its nonzero eigenvalues are those of a d_head x d_head
matrix: C = R W with R = W_E W_V (tokens, d_head) and W = W_O W_U (d_head, tokens), and R W and W R have the same ones.
A head that raises the logit of what it attends to has positive ones; their share is the copying score

    sum_k lambda_k / sum_k |lambda_k|  =  tr(W R) / sum_k |lambda_k|,    from -1 to 1.

W_E is what the head reads of each token alone and W_U has its mean over tokens taken off, which softmax does not see:
a vector added to every column of the unembedding changes no prediction, and so no score.
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

_CELLS = 1 << 23  # of the circuit that are in memory at a time
_BLOCK = 1 << 12  # tokens that are widened at a time


@dataclass(frozen=True, eq=False, repr=False)
class Copying:
    """How a head maps tokens to logits; made by `copying`.

    Parameters
    ----------
    eigenvalues
        (d_head,), complex, the largest modulus first: all that the circuit has besides zeros.
    ranks
        (tokens,): how many other logits every token raises at least as much as its own; 0 where it copies.
    vocab
        Count of tokens that there are. Where `ranks` are fewer they are a sample.
    """

    eigenvalues: Array
    ranks: Array
    vocab: int

    @property
    def score(self) -> float:
        """The sum of the eigenvalues over the sum of their moduli: 1 where the head copies, 0 by chance."""
        return _score(self.eigenvalues)

    def accuracy(self, k: int = 1) -> float:
        """Return the share of tokens whose own logit is among the k that they raise most; chance is k / vocab."""
        return float((self.ranks < as_count("Copying.accuracy", "k", k)).mean())

    def __repr__(self) -> str:
        of = "" if len(self.ranks) == self.vocab else f" of {len(self.ranks):,} tokens"
        return f"Copying(score {self.score:.3f}, top 1 {self.accuracy(1):.3f}, top 5 {self.accuracy(5):.3f}{of})"


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
    """Return whether what a head writes for a token raises the logit of that token.

    Parameters
    ----------
    model
        A checkpoint with an unembedding.
    layer, head
        Counted from 0.
    vocabulary
        What `read_vocabulary(model)` returned, read once for many heads.
    sample
        How many tokens to draw for the ranks; None: all. Eigenvalues always count all of them. All tokens of GPT-2 take
        some seconds a head; what is in memory does not grow with the vocabulary squared.
    rng
        For the draw.

    Returns
    -------
    Copying
        `eigenvalues`, `score`, `accuracy(k)`.

    Raises
    ------
    ArgumentError
        If there is no such head, or the model ends in hidden states.

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
    found = stream_head("copying", model, layer, head)
    words = _ends_in_logits("copying", model, vocabulary)
    chosen = np.arange(len(words))
    if sample is not None and as_count("copying", "sample", sample) < len(words):
        chosen = np.sort(as_rng("copying", rng).choice(len(words), sample, replace=False))
    return circuit_copying(found, words, chosen)


@single_threaded_blas
def copying_scores(model: Checkpoint, *, vocabulary: Vocabulary | None = None) -> Array:
    """Return the copying score of every head, (layers, heads), from one pass over the vocabulary.

    Parameters
    ----------
    model
        A checkpoint with an unembedding.
    vocabulary
        What `read_vocabulary(model)` returned.

    Returns
    -------
    ndarray
        `copying(model, layer, head).score` of each. The sum over tokens of what is read times what is written is one
        matrix (d_model, d_model + 1) for all heads.

    Raises
    ------
    ArgumentError
        If the model ends in hidden states.

    Examples
    --------
    >>> import tnlib_adapters
    >>> copying_scores(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())).round(2)[1]
    array([1., 1., 1., 1.])
    """
    words = _ends_in_logits("copying_scores", as_checkpoint("copying_scores", model, "model"), vocabulary)
    found = np.zeros((model.n_layers, model.sizes.n_heads))
    between = None
    for at in np.ndindex(found.shape):
        head = stream_head("copying_scores", model, *at)
        ov = head.attention.ov(0)
        between = words.between(head.norm) if between is None else between  # norms of all layers divide alike
        found[at] = _score(np.linalg.eigvals(ov.right[:, :-1] @ between @ ov.left))  # dh [d] [d~] dh
    return found


def circuit_copying(found: StreamHead, words: Vocabulary, chosen: Array) -> Copying:
    """Return the eigenvalues of a head's circuit, and the ranks of the tokens that are chosen."""
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
    """Return for every chosen token how many other logits are at least as large as its own, block by block."""
    ranks = np.empty(len(chosen), np.int64)
    block = max(1, _CELLS // writes.shape[1])
    for start in range(0, len(chosen), block):
        tokens = chosen[start : start + block]
        logits = parallel_matmul(reads[tokens], writes)  # token [dh] vocab
        own = logits[np.arange(len(tokens)), tokens]
        ranks[start : start + block] = np.count_nonzero(logits >= own[:, None], axis=1) - 1
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
