r"""Copying through a head: the circuit from tokens to logits, W_E OV W_U.

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

import numpy as np

from tnlib import TnlibError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng
from tnlib.linalg.threads import parallel_matmul, single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.effective_head import StreamHead, stream_head
from tnlib_adapters.circuits.tokens.vocabulary import Inputs, Vocabulary, vocabulary_of_logits, with_inputs
from tnlib_adapters.result_table import HeadTable

_CELLS = 1 << 23  # logits in memory at a time
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
    inputs
        What the head reads for a token, in words.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Copying / primitive in-context
    learning".

    Examples
    --------
    >>> import numpy as np
    >>> found = Copying(np.array([3.0, -1.0]), ranks=np.array([0, 0, 2, 5]), vocab=8)
    >>> found.score, found.accuracy(1), found.accuracy(3)
    (0.5, 0.5, 0.75)
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
    >>> # an induction head, a previous-token head
    >>> [round(copying(model, *head).score, 2) for head in ((1, 2), (0, 3))]
    [1.0, -0.98]
    """
    effective = stream_head("copying", model, layer, head)
    words = vocabulary_of_logits("copying", model, inputs, "inputs")
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

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = copying_scores(model)
    >>> found.embeddings.round(1)  # heads of layer 1 copy, head 0.3 lowers its token
    array([[-0.4, -0.4, -0.6, -1. ],
           [ 1. ,  1. ,  1. ,  1. ]])
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
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = copying_scores(model)
    >>> found.embeddings.round(2)[1], found.first_layer.round(2)[1]
    (array([1., 1., 1., 1.]), array([1., 1., 1., 1.]))
    """
    words = vocabulary_of_logits("copying_scores", model, inputs, "inputs")
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
