"""Load the embedding and the unembedding of a checkpoint as a `Vocabulary`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.residual_stream import unembedding
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary
from tnlib_adapters.files.token_names import token_names
from tnlib_adapters.reference.layers import Norm
from tnlib_adapters.reference.weights import read_embedding, read_final_norm, read_unembedding

_BLOCK = 4096  # tokens per block converted to float64


def as_vocabulary(function: str, model: Checkpoint, vocabulary: Vocabulary | None) -> Vocabulary:
    """Return the given vocabulary, validated, or load that of the model."""
    if vocabulary is None:
        return read_vocabulary(model)
    if not isinstance(vocabulary, Vocabulary):
        raise ArgumentTypeError(
            f"{function}: vocabulary must be a Vocabulary, got {type(vocabulary).__name__}; "
            "pass read_vocabulary(model)."
        )
    if vocabulary.table.shape[1] != model.sizes.d_model:
        raise ArgumentError(
            f"{function}: vocabulary must have {model.sizes.d_model} features, as the model has, got "
            f"{vocabulary.table.shape[1]}; pass read_vocabulary(model)."
        )
    return vocabulary


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Load the embedding and the unembedding of a checkpoint, in float32 unless they are stored in float64.

    Parameters
    ----------
    checkpoint
        Checkpoint of a model that reads tokens. A norm of the embedding is applied to each token alone; the first
        segment embedding, if any, is added to every row.

    Returns
    -------
    Vocabulary
        `read` and `write` map directions to tokens; `name` returns the tokenizer's text of a token.

    Raises
    ------
    ArgumentError
        If the model reads images.
    FileFormatError
        If a tensor is missing, or a tokenizer file is damaged.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> words = read_vocabulary(model)
    >>> words, words.name(309)
    (Vocabulary(1024 tokens of 128 features, tied, with their text), "' in'")
    """
    row = as_checkpoint("read_vocabulary", checkpoint).architecture
    if row.reads != "tokens":
        raise ArgumentError(
            f"read_vocabulary: checkpoint must read tokens, got a {row.model_type}, which reads {row.reads}; "
            "its heads have no token space."
        )
    info = checkpoint.locate(f"{row.embeddings[0]}.weight")
    stored = np.dtype(np.float64 if info is not None and info.dtype == "F64" else np.float32)
    embedding = read_embedding(checkpoint)
    table = embedding.tokens if embedding.segment is None else embedding.tokens + embedding.segment
    table = table.astype(stored, copy=False)
    embedding = replace(embedding, tokens=table)  # frees the float64 table
    name, head = unembedding(checkpoint), read_unembedding(checkpoint)
    tied = name in row.embeddings and not (row.embedding_scale or embedding.segment is not None or row.narrow)
    divisors, mean_square, variance = _moments(table, embedding.norm)
    return Vocabulary(
        table=table,
        norm=embedding.norm,
        divisors_of_table=divisors,
        mean_row=table.mean(axis=0, dtype=np.float64),
        mean_square=mean_square,
        variance=variance,
        unembed=table if head is None or tied else np.ascontiguousarray(head.affine.weight.T.astype(stored)),
        bias=None if head is None else head.affine.bias,
        cap=None if head is None else head.cap,
        final=None if head is None else read_final_norm(checkpoint),
        positions=embedding.positions,
        names=token_names(checkpoint.folder.path),
        ends_in_logits=head is not None,
    )


def _moments(table: Array, norm: Norm | None) -> tuple[Array | None, Array, Array]:
    """Return the divisors of the embedding norm, and mean squares and variances of the rows after it."""
    divisors = None if norm is None else np.empty(len(table))
    mean_square, variance = np.empty(len(table)), np.empty(len(table))
    for start in range(0, len(table), _BLOCK):
        part = slice(start, start + _BLOCK)
        x = table[part].astype(np.float64)
        if norm is not None and divisors is not None:
            divisors[part] = norm.divisors(norm.centre(x))[:, 0]
            x = norm(x)
        mean_square[part] = np.square(x).mean(axis=1)
        variance[part] = x.var(axis=1)
    return divisors, mean_square, variance
