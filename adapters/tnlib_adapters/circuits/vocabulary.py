r"""The two ends of a model, the space of tokens: what a direction of the stream is to each token of the vocabulary.

With the row e_t that the stream holds for token t alone, positions left out, and n(x) the division of the norm in
front of a head, a direction u~ = [u, c] that the head reads is to the token

    n(e_t) u + c

and a direction v that the head writes moves its logit by v diag(w) u_t, with the weights w of the final norm and the
unembedding u_t, up to the division of that norm and to what all logits have in common, which softmax does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.threads import matmul
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.attention.stream import unembedding
from tnlib_adapters.checkpoints.token_names import token_names
from tnlib_adapters.forward.layers import Norm
from tnlib_adapters.forward.weights import read_embedding, read_final_norm, read_unembedding

_BLOCK = 4096  # tokens whose rows are widened at a time


@dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """Tokens as the stream holds them, and as logits read them; made by `read_vocabulary`, once for many heads.

    Parameters
    ----------
    rows
        (vocab, d_model), what the stream starts with for each token alone: embeddings as the stream has them, after
        their norm where there is one, without positions.
    mean_square, variance
        (vocab,), of each row: what norms divide by.
    unembed
        (vocab, d_model); `rows` themselves where the two are tied.
    bias
        (vocab,) of the logits, or None.
    cap
        Of the logits, or None.
    final
        The norm in front of the unembedding, or None.
    positions
        (context, d_model), learned, or None.
    names
        Text of each token by its number, or None.
    ends_in_logits
        False where the model has no unembedding; then `unembed` is the embeddings.
    normed
        Whether the embeddings have a norm of their own.
    """

    rows: Array
    mean_square: Array
    variance: Array
    unembed: Array
    bias: Array | None
    cap: float | None
    final: Norm | None
    positions: Array | None
    names: dict[int, str] | None
    ends_in_logits: bool
    normed: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        named = "" if self.names is None else ", with their text"
        tied = ", tied" if self.unembed is self.rows and self.ends_in_logits else ""
        return f"Vocabulary({len(self)} tokens of {self.rows.shape[1]} features{tied}{named})"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what tokens are here without."""
        found = []
        if self.positions is not None:
            found.append("tokens stand without their learned positions")
        if not self.ends_in_logits:
            found.append("there is no unembedding: what is written is named by the embeddings")
        elif self.final is not None:
            found.append("weights of the final norm are folded in, its division is left out")
        return tuple(found)

    def name(self, token: int) -> str:
        """Return the text of a token in quotes, or its number where that is not known."""
        text = None if self.names is None else self.names.get(int(token))
        return str(int(token)) if text is None else repr(text)

    def divisors(self, norm: Norm) -> Array:
        """Return what a norm divides the row of each token by, (vocab,)."""
        return np.asarray(np.sqrt((self.variance if norm.centred else self.mean_square) + norm.eps))

    def read(self, columns: Array, norm: Norm | None) -> Array:
        """Return n(e_t) u + c of every token for columns [u; c], (vocab, r) for (d_model + 1, r)."""
        main, constant = columns[:-1], columns[-1]
        if norm is not None and norm.centred:
            main = main - main.mean(axis=0)
        found = matmul(self.rows, main.astype(self.rows.dtype))  # vocab [d] r
        if norm is not None:
            found /= self.divisors(norm).astype(found.dtype)[:, None]
        found += constant.astype(found.dtype)
        return found

    def read_positions(self, columns: Array, norm: Norm | None) -> Array | None:
        """Return p_i u of every learned position for columns [u; c], (context, r), as divided as a token on average.

        None where positions are not learned, or a norm stands between them and the stream.
        """
        if self.positions is None or self.normed:
            return None
        main = columns[:-1] - (columns[:-1].mean(axis=0) if norm is not None and norm.centred else 0)
        found = self.positions @ main  # i [d] r
        return np.asarray(found if norm is None else found * (1 / self.divisors(norm)).mean())

    def write(self, rows: Array) -> Array:
        """Return what rows (r, d_model), added to the final stream, add to every logit, (r, vocab)."""
        if self.final is not None:
            rows = (rows - rows.mean(axis=1, keepdims=True) if self.final.centred else rows) * self.final.weight
        found = matmul(self.unembed, rows.T.astype(self.unembed.dtype)).T  # r [d] vocab
        return np.asarray(found - found.mean(axis=1, keepdims=True, dtype=np.float64).astype(found.dtype))


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Read the embedding and the unembedding of a checkpoint, in float32 unless they are stored in float64.

    Parameters
    ----------
    checkpoint
        Of a model that reads tokens. Where the token embeddings have a norm of their own, it is applied to each token
        alone; where there are segments, the first is in every row.

    Returns
    -------
    Vocabulary
        `read` and `write` take directions to tokens; `name` says what the tokenizer of the folder calls one.

    Raises
    ------
    ArgumentError
        If the model reads images.
    FileFormatError
        If a tensor is missing, or a file of the tokenizer is damaged.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> words = read_vocabulary(model)
    >>> words, words.name(309)
    (Vocabulary(1024 tokens of 128 features, tied, with their text), "' in'")
    """
    row = checkpoint.architecture
    if row.reads != "tokens":
        raise ArgumentError(
            f"read_vocabulary: checkpoint must read tokens, got a {row.model_type}, which reads {row.reads}; "
            "its heads have no token space."
        )
    table = checkpoint.locate(f"{row.embeddings[0]}.weight")
    stored = np.dtype(np.float64 if table is not None and table.dtype == "F64" else np.float32)
    rows, positions = _rows(checkpoint, stored)
    mean_square, variance = _moments(rows)
    name = unembedding(checkpoint)
    head = read_unembedding(checkpoint)
    plain = not (row.embedding_scale or row.embedding_norm or len(row.embeddings) > 2 or row.narrow)
    tied = name in row.embeddings and plain
    return Vocabulary(
        rows=rows,
        mean_square=mean_square,
        variance=variance,
        unembed=rows if head is None or tied else np.ascontiguousarray(head.affine.weight.T.astype(stored)),
        bias=None if head is None else head.affine.bias,
        cap=None if head is None else head.cap,
        final=None if head is None else read_final_norm(checkpoint),
        positions=positions,
        names=token_names(checkpoint.folder.path),
        ends_in_logits=head is not None,
        normed=row.embedding_norm is not None,
    )


def _rows(checkpoint: Checkpoint, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    embedding = read_embedding(checkpoint)
    table, positions = embedding.tokens, embedding.positions
    rows = np.empty(table.shape, dtype)
    for start in range(0, len(table), _BLOCK):
        x = table[start : start + _BLOCK]
        x = x if embedding.segment is None else x + embedding.segment
        rows[start : start + _BLOCK] = x if embedding.norm is None else embedding.norm(x)
    return rows, positions


def _moments(rows: Array) -> tuple[Array, Array]:
    mean_square, variance = np.empty(len(rows)), np.empty(len(rows))
    for start in range(0, len(rows), _BLOCK):
        x = rows[start : start + _BLOCK].astype(np.float64)
        mean_square[start : start + _BLOCK] = np.square(x).mean(axis=1)
        variance[start : start + _BLOCK] = x.var(axis=1)
    return mean_square, variance
