"""Direct path W_E W_U: bigram predictions of a model with all layers removed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count, to_numpy
from tnlib.linalg.threads import parallel_matmul, single_threaded_blas
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.tokens.embeddings import as_vocabulary
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary

_CELLS = 1 << 23  # logits in memory at a time
_SHOWN = 12


@dataclass(frozen=True, eq=False, repr=False)
class Bigrams:
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

    def __repr__(self) -> str:
        name = self.vocabulary.name
        rows = zip(self.tokens[:_SHOWN], self.successors, self.probabilities, strict=False)
        lines = [
            f"{name(token):>12} -> "
            + "  ".join(f"{name(s)} {p:.2f}" for s, p in zip(successors, probabilities, strict=True))
            for token, successors, probabilities in rows
        ]
        more = len(self.tokens) - _SHOWN
        return "\n".join(lines + [f"... and {more:,} more tokens"] * (more > 0))


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
        A checkpoint with an unembedding.
    tokens
        (n,), integers: the current tokens. None: every token, at vocab^2 d_model multiplications and no additional
        memory.
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
    words = as_vocabulary("bigrams", as_checkpoint("bigrams", model, "model"), vocabulary)
    if not words.ends_in_logits:
        raise ArgumentError(
            f"bigrams: model must have an unembedding, got a {model.architecture.model_type}, which ends in hidden "
            "states; load one with a head for tokens."
        )
    if as_count("bigrams", "k", k) > len(words):
        raise ArgumentError(f"bigrams: k must be at most {len(words)}, the count of tokens, got {k}; choose a smaller.")
    chosen = np.arange(len(words)) if tokens is None else _tokens(tokens, len(words))
    successors, probabilities = np.empty((len(chosen), k), np.int64), np.empty((len(chosen), k))
    block = max(1, _CELLS // len(words))
    for start in range(0, len(chosen), block):
        part = slice(start, start + block)
        successors[part], probabilities[part] = _likeliest(_logits(words, chosen[part]), k)
    return Bigrams(chosen, successors, probabilities, words)


def _logits(words: Vocabulary, tokens: Array) -> Array:
    x = words.rows(tokens)
    x = x if words.final is None else words.final(x)
    logits = parallel_matmul(x.astype(words.unembed.dtype), words.unembed.T)  # token [d] vocab
    logits = logits if words.bias is None else logits + words.bias.astype(logits.dtype)
    return logits if words.cap is None else words.cap * np.tanh(logits / words.cap)


def _likeliest(logits: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest logits of each row, descending, and their softmax probabilities."""
    near = np.argpartition(-logits, k - 1, axis=1)[:, :k]
    sizes = np.take_along_axis(logits, near, axis=1)
    order = np.argsort(-sizes, axis=1, kind="stable")
    near, sizes = (np.take_along_axis(a, order, axis=1) for a in (near, sizes))
    top = sizes[:, :1]
    total = np.exp(logits - top).sum(axis=1, keepdims=True, dtype=np.float64)
    return near, np.exp((sizes - top).astype(np.float64)) / total


def _tokens(tokens: Array, vocab: int) -> Array:
    a = np.atleast_1d(to_numpy("bigrams", "tokens", tokens))
    if a.dtype.kind not in "iu" or a.ndim != 1:
        raise ArgumentError(
            f"bigrams: tokens must be integers of shape (n,), got {a.dtype} of shape {a.shape}; "
            "pass the numbers of the tokenizer."
        )
    if a.size and (a.min() < 0 or a.max() >= vocab):
        raise ArgumentError(
            f"bigrams: tokens must lie between 0 and {vocab - 1}, got {a[(a < 0) | (a >= vocab)][0]}; "
            "use the tokenizer that belongs to the model."
        )
    return a.astype(np.int64)
