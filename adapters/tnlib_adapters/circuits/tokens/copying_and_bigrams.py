r"""Circuits from tokens to logits: the direct path W_E W_U, and copying through a head, W_E OV W_U.

C = W_E OV W_U is (vocab, vocab) with rank at most d_head. With R = W_E W_V (tokens, d_head) and W = W_O W_U (d_head,
tokens), C = R W has the same nonzero eigenvalues as W R (d_head, d_head). A head that raises the logits of the tokens
it attends to tends to have eigenvalues with positive real parts. The copying score is

    sum_k lambda_k / sum_k |lambda_k|  =  tr(W R) / sum_k |lambda_k|,    from -1 to 1.

W_E is the head's input for each token alone: its embedding, or the stream that the first layer makes of it. Neither is
right for all heads of a deep model, so that `copying_scores` returns both. The mean over tokens is subtracted from W_U:
softmax is invariant to a vector added to every column of the unembedding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError, TnlibError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng
from tnlib.linalg.threads import parallel_matmul, run_parallel, single_threaded_blas, split_range, thread_count
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.circuits.effective_head import StreamHead, stream_head
from tnlib_adapters.circuits.tokens.vocabulary import Inputs, Vocabulary, as_vocabulary, with_inputs
from tnlib_adapters.reference.embedding import as_token_ids
from tnlib_adapters.result_table import Columns, HeadTable, Table

_CELLS = 1 << 25  # logits in memory at a time: products of 512 rows or more take two thirds of the time of 170 rows
_BLOCK = 1 << 12  # tokens per block converted to float64
_GROUP = 256  # tokens of which the largest logit is found first
_SHOWN = 12  # tokens listed by repr


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
    inputs
        What the head reads for a token, in words.
    """

    eigenvalues: Array
    ranks: Array
    vocab: int
    inputs: str = "embeddings"

    @property
    def score(self) -> float:
        """Sum of the eigenvalues over the sum of their moduli, 1 for a copying head and 0 by chance."""
        return _score(self.eigenvalues)

    def accuracy(self, k: int = 1) -> float:
        """Return the fraction of tokens whose own logit is among the k that they raise most; chance is k / vocab."""
        return float((self.ranks < as_count("Copying.accuracy", "k", k)).mean())

    def __repr__(self) -> str:
        sampled = "" if len(self.ranks) == self.vocab else f" of {len(self.ranks):,} tokens"
        score = f"score {self.score:.3f}"
        return (
            f"Copying({score}, top 1 {self.accuracy(1):.3f}, top 5 {self.accuracy(5):.3f}{sampled}, of {self.inputs})"
        )


@accepts_models
@single_threaded_blas
def copying(
    model: Checkpoint,
    layer: int,
    head: int,
    *,
    inputs: Inputs | Vocabulary = "embeddings",
    sample: int | None = None,
    rng: int | np.random.Generator = 0,
) -> Copying:
    """Return copying scores of a head: whether its output for a token raises the logit of that token.

    Parameters
    ----------
    model
        A checkpoint or transformers model with an unembedding.
    layer, head
        Indices, from 0.
    inputs
        What the head reads for a token: "embeddings" or "first layer", see `read_vocabulary`, or its result, which
        serves several heads.
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
    >>> [round(copying(model, *head).score, 2) for head in ((1, 2), (0, 3))]  # an induction head, a previous-token head
    [1.0, -0.98]
    """
    effective = stream_head("copying", model, layer, head)
    words = _ends_in_logits("copying", model, inputs)
    chosen = np.arange(len(words))
    if sample is not None and as_count("copying", "sample", sample) < len(words):
        chosen = np.sort(as_rng("copying", rng).choice(len(words), sample, replace=False))
    return circuit_copying(effective, words, chosen)


@dataclass(frozen=True, eq=False, repr=False)
class CopyingScores(HeadTable):
    """Copying scores of all heads by what a head reads for a token, returned by `copying_scores`.

    Parameters
    ----------
    embeddings
        (layers, heads), where the head reads the embedding of the token; None if not asked for.
    first_layer
        (layers, heads), where it reads the stream that the first layer makes of the token; None if not asked for.
    """

    embeddings: Array | None
    first_layer: Array | None

    _SCORES = ("embeddings", "first_layer")

    @property
    def by_inputs(self) -> dict[str, Array]:
        """The scores that were asked for, by the inputs of the heads in words."""
        named = {"embeddings": self.embeddings, "streams after layer 0": self.first_layer}
        return {inputs: scores for inputs, scores in named.items() if scores is not None}

    @property
    def _title(self) -> str:
        return f"Copying scores of {next(iter(self._scores().values())).size} heads by their inputs, from -1 to 1"

    def _picture(self) -> str:
        return "".join(heat_image(values, name, width=160) for name, values in self._scores().items())


@accepts_models
def copying_scores(model: Checkpoint, *, inputs: Inputs | Vocabulary | None = None) -> CopyingScores:
    """Return the copying scores of all heads, `copying(model, layer, head, inputs=inputs).score` of each.

    Parameters
    ----------
    model
        A checkpoint or transformers model with an unembedding.
    inputs
        As in `copying`. None: embeddings, and the first layer too if the model has at least two layers and can be run.

    Returns
    -------
    CopyingScores
        One array (layers, heads) for each of the inputs. Heads of deep models that copy have a score near 1 for one of
        them. All heads share one matrix (d_model, d_model + 1), the sum over tokens of unembedding times input.

    Raises
    ------
    ArgumentError
        If the model has no unembedding.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> found = copying_scores(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    >>> found.embeddings.round(2)[1], found.first_layer.round(2)[1]
    (array([1., 1., 1., 1.]), array([1., 1., 1., 1.]))
    """
    words = _ends_in_logits("copying_scores", as_one_stream("copying_scores", model, "model"), inputs or "embeddings")
    both = [words]
    if inputs is None and model.n_layers > 1:
        with contextlib.suppress(TnlibError):  # a model that cannot be run
            both.append(with_inputs(model, words, "first layer"))
    return scores_of_inputs(model, both)


@single_threaded_blas
def scores_of_inputs(model: Checkpoint, vocabularies: Sequence[Vocabulary]) -> CopyingScores:
    """Return the copying scores of all heads for vocabularies of one model with different inputs."""
    norm = stream_head("copying_scores", model, 0, 0).norm  # all norms have the same divisors
    between = {words.inputs: words.between(norm) for words in vocabularies}
    scores = {name: np.zeros((model.n_layers, model.sizes.n_heads)) for name in between}
    for k in range(model.n_layers):
        layer = stream_head("copying_scores", model, k, None).attention
        for name, matrix in between.items():
            of_values = layer.repeated(matrix @ layer.with_bias("V"))  # h d [d~] dh
            scores[name][k] = [_score(values) for values in np.linalg.eigvals(layer.W_O @ of_values)]  # h dh [d] dh
    return CopyingScores(scores.get("embeddings"), scores.get("first layer"))


def circuit_copying(head: StreamHead, words: Vocabulary, chosen: Array) -> Copying:
    """Return the eigenvalues of a head's circuit, and the ranks of the chosen tokens."""
    ov = head.attention.ov(0)
    reads = words.read(ov.left, head.norm)  # vocab dh
    writes = words.write(ov.right[:, :-1])  # dh vocab
    values = np.linalg.eigvals(_product(writes, reads))
    order = np.lexsort([-values.imag, -np.abs(values)])
    ranks = _ranks(reads, writes, chosen)
    return Copying(values[order].astype(np.complex128), ranks, len(words), words.inputs_text)


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


def _ends_in_logits(function: str, model: Checkpoint, inputs: Inputs | Vocabulary) -> Vocabulary:
    words = as_vocabulary(function, model, inputs, "inputs")
    if not words.ends_in_logits:
        raise ArgumentError(
            f"{function}: model must have an unembedding, got a {model.wiring.model_type}, which ends in hidden "
            "states; load one with a head for tokens."
        )
    return words


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
    words = as_vocabulary("bigrams", as_one_stream("bigrams", model, "model"), vocabulary)
    if not words.ends_in_logits:
        raise ArgumentError(
            f"bigrams: model must have an unembedding, got a {model.wiring.model_type}, which ends in hidden "
            "states; load one with a head for tokens."
        )
    if as_count("bigrams", "k", k) > len(words):
        raise ArgumentError(f"bigrams: k must be at most {len(words)}, the count of tokens, got {k}; choose a smaller.")
    chosen = np.arange(len(words)) if tokens is None else as_token_ids("bigrams", tokens, len(words)).ravel()
    successors, probabilities = np.empty((len(chosen), k), np.int64), np.empty((len(chosen), k))
    block = max(1, _CELLS // len(words))
    for start in range(0, len(chosen), block):
        logits = _logits(words, chosen[start : start + block])

        def keep(i: int, j: int, logits: Array = logits, start: int = start) -> None:
            rows = slice(start + i, start + j)
            successors[rows], probabilities[rows] = likeliest(logits[i:j], k)

        run_parallel(keep, split_range(len(logits), thread_count()))
    return Bigrams(chosen, successors, probabilities, words)


def _logits(words: Vocabulary, tokens: Array) -> Array:
    x = words.rows(tokens)
    x = x if words.final is None else words.final(x)
    logits = parallel_matmul(x.astype(words.unembed.dtype), words.unembed.T)  # token [d] vocab
    logits = logits if words.bias is None else logits + words.bias.astype(logits.dtype)
    return logits if words.cap is None else words.cap * np.tanh(logits / words.cap)


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
