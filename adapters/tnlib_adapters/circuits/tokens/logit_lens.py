"""Logit lens: the predictions that the residual stream would give after every block, through the final norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib_adapters.attention.softmax import log_softmax
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.files.tokenizer import token_names
from tnlib_adapters.frozen.frozen_model import freeze
from tnlib_adapters.reference.layers import normed
from tnlib_adapters.reference.weights import Weights
from tnlib_adapters.result_table import Columns, Table

_SHOWN = 16  # streams listed by repr


@dataclass(frozen=True, eq=False, repr=False)
class LogitLens(Table):
    """Predictions of the stream after every block, returned by `logit_lens`; printed for the last position.

    Parameters
    ----------
    streams
        "embedding", then the layers of every block: "0" for attention 0, "mlp 0".
    tokens, log_probabilities
        (streams, n, k): the most probable next tokens and their log-probabilities.
    divergences
        (streams, n): KL divergence of the predictions of the model from these, in nats; 0 for the last stream.
    names
        Texts of tokens, where the tokenizer is known.

    References
    ----------
    nostalgebraist, "interpreting GPT: the logit lens" (2020).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = logit_lens(model, [5, 6, 7, 8])
    >>> found.divergences[:-1, -1].round().tolist()  # of the last token, in nats, by layer
    [18.0, 16.0, 4.0, 5.0, 5.0, 3.0, 2.0, 0.0]
    """

    streams: tuple[str, ...]
    tokens: Array
    log_probabilities: Array
    divergences: Array
    names: Mapping[int, str]

    @property
    def _title(self) -> str:
        n = self.tokens.shape[1]
        return f"Logit lens of {len(self.streams)} streams on {n} tokens, at the last of them"

    def _columns(self, rows: Any) -> Columns:
        at = np.arange(len(self.streams))[rows]
        columns: Columns = {"after": np.array(self.streams, dtype=object)[at], "divergence": self.divergences[at, -1]}
        for k in range(self.tokens.shape[2]):
            columns[f"next_{k + 1}"] = [self._name(token) for token in self.tokens[at, -1, k].tolist()]
            columns[f"p_{k + 1}"] = np.exp(self.log_probabilities[at, -1, k])
        return columns

    def _name(self, token: int) -> str:
        return repr(self.names[token]) if token in self.names else str(token)

    def _printed(self) -> Array:
        last = len(self.streams) - 1
        return np.unique(np.linspace(0, last, min(_SHOWN, last + 1)).round().astype(int))


@accepts_models
def logit_lens(model: Checkpoint | Weights, tokens: ArrayLike, *, k: int = 3) -> LogitLens:
    """Return the k most probable next tokens of the stream after every block, at every position.

    Parameters
    ----------
    model
        A checkpoint, transformers model or loaded `Weights` with an unembedding.
    tokens
        (n,), integers, or a text: one sequence.
    k
        Number of tokens.

    Raises
    ------
    ArgumentError
        If the model has no unembedding, the tokens are not one sequence, or k is too large.

    References
    ----------
    nostalgebraist, "interpreting GPT: the logit lens" (2020).

    Examples
    --------
    >>> import tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = logit_lens(llama, [5, 6, 7, 8])
    >>> first, last = found.divergences[0], found.divergences[-1]
    >>> found.tokens.shape, found.streams[:3], bool((first > last).all())
    ((9, 4, 3), ('embedding', '0', 'mlp 0'), True)
    """
    count = as_count("logit_lens", "k", k)
    frozen = freeze(model, tokens)
    if frozen.unembed is None:
        raise ArgumentError("logit_lens: model must have an unembedding, got one that ends in hidden states.")
    vocab = frozen.unembed.affine.weight.shape[1]
    if count > vocab:
        raise ArgumentError(f"logit_lens: k must be at most {vocab}, the size of the vocabulary, got {count}.")
    streams = [frozen.embedding, *(block.stream_after for block in frozen.blocks)]
    final = log_softmax(frozen.unembed(normed(frozen.norm, streams[-1])))  # n vocab
    best, sizes, divergences = [], [], []
    for stream in streams:
        log_p = log_softmax(frozen.unembed(normed(frozen.norm, stream)))
        first = np.argpartition(-log_p, count - 1, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(log_p, first, axis=1), axis=1, kind="stable")
        best.append(np.take_along_axis(first, order, axis=1))
        sizes.append(np.take_along_axis(log_p, best[-1], axis=1))
        divergences.append((np.exp(final) * (final - log_p)).sum(axis=1, dtype=np.float64))
    folder = model.folder.path if isinstance(model, Checkpoint) else getattr(model.embedding, "folder", None)
    names = None if folder is None else token_names(folder, "logit_lens")
    labels = ("embedding", *(", ".join(block.names) for block in frozen.blocks))
    return LogitLens(labels, np.stack(best), np.stack(sizes), np.stack(divergences), names or {})
