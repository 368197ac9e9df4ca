r"""Token space of a model: inner products of stream directions with embedding and unembedding.

Let e_t be the row of the stream for token t alone, without positions, and n(x) the division of the norm before a head.
A direction u~ = [u, c] that the head reads has at token t the coordinate

    n(e_t) u + c

Tokens are read as embeddings, or as the streams that the first layer makes of each token alone: in deep models it
rewrites the embeddings, and later heads read what it writes.

A direction v that the head writes changes the logit of t by v diag(w) u_t, with the weights w of the final norm and the
unembedding u_t, up to the division of that norm and a shift common to all logits, to which softmax is invariant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal, get_args

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, check_choice
from tnlib.linalg.threads import parallel_matmul
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.files.tokenizer import token_names
from tnlib_adapters.reference.layers import Norm
from tnlib_adapters.reference.weights import (
    named_blocks,
    read_embedding,
    read_norm,
    read_unembedding,
    read_weights,
)

Inputs = Literal["embeddings", "first layer"]
_BLOCK = 4096  # tokens per block converted to float64


@dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """Embedding and unembedding of a model, returned by `read_vocabulary`; reusable for many heads.

    Parameters
    ----------
    table
        (vocab, d_model), the token embeddings without positions.
    norm
        Norm of the embedding, or None; it is applied to each token alone.
    unembed
        (vocab, d_model), the unembedding; `table` itself if the two are tied.
    bias
        (vocab,), bias of the logits, or None.
    cap
        Soft cap of the logits, or None.
    final
        Norm before the unembedding, or None.
    positions
        (context, d_model), learned positions, or None.
    names
        Text of each token, by number, or None.
    ends_in_logits
        False if the model has no unembedding; `unembed` is then the embedding.
    inputs
        "embeddings", or "first layer" if `table` holds the streams after it.

    Examples
    --------
    >>> import tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> words = read_vocabulary(llama)
    >>> changes = words.write(words.unembed[[309]])  # of the logits, by a token's direction
    >>> changes.shape, words.name(changes[0].argmax())
    ((1, 1024), "' in'")
    """

    table: Array
    norm: Norm | None
    unembed: Array
    bias: Array | None
    cap: float | None
    final: Norm | None
    positions: Array | None
    names: dict[int, str] | None
    ends_in_logits: bool
    inputs: Inputs = "embeddings"

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        text = "" if self.names is None else ", with their text"
        tied = ", tied" if self.unembed is self.table and self.ends_in_logits else ""
        return f"Vocabulary({len(self)} tokens of {self.table.shape[1]} features{tied}{text})"

    @cached_property
    def mean_row(self) -> Array:
        """(d_model,), mean row of the table."""
        return np.asarray(self.table.mean(axis=0, dtype=np.float64))

    @property
    def divisors_of_table(self) -> Array | None:
        """(vocab,), divisors of the norm of the embedding, or None."""
        return self._moments[0]

    @property
    def mean_square(self) -> Array:
        """(vocab,), mean square of each row after the norm of the embedding."""
        return self._moments[1]

    @property
    def variance(self) -> Array:
        """(vocab,), variance of each row after the norm of the embedding."""
        return self._moments[2]

    @cached_property
    def _moments(self) -> tuple[Array | None, Array, Array]:
        divisors = None if self.norm is None else np.empty(len(self))
        mean_square, variance = np.empty(len(self)), np.empty(len(self))
        for start in range(0, len(self), _BLOCK):
            part = slice(start, start + _BLOCK)
            x = self.table[part].astype(np.float64)
            if self.norm is not None and divisors is not None:
                divisors[part] = self.norm.divisors(self.norm.centre(x))[:, 0]
                x = self.norm(x)
            mean_square[part] = np.square(x).mean(axis=1)
            variance[part] = x.var(axis=1)
        return divisors, mean_square, variance

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the parts of the model that token coordinates omit."""
        sentences = [f"heads read {self.inputs_text}"]
        if self.positions is not None:
            sentences.append("tokens are read without their learned positions")
        if not self.ends_in_logits:
            sentences.append("there is no unembedding: outputs are named by the embeddings")
        elif self.final is not None:
            sentences.append("weights of the final norm are folded in, its division is left out")
        return tuple(sentences)

    @property
    def inputs_text(self) -> str:
        """Inputs of the heads, in words."""
        return "embeddings" if self.inputs == "embeddings" else "the stream that the first layer makes of each token"

    def name(self, token: int) -> str:
        """Return the text of a token in quotes, or its number if the text is not known."""
        number = as_count("Vocabulary.name", "token", token, least=0)
        text = None if self.names is None else self.names.get(number)
        return str(number) if text is None else repr(text)

    def rows(self, tokens: Array) -> Array:
        """Return the stream of tokens (n,) without positions, (n, d_model)."""
        x = self.table[tokens]
        return x if self.norm is None else self.norm(x)

    def read(self, columns: Array, norm: Norm | None) -> Array:
        """Return :math:`n(e_t) u + c` of every token t for columns [u; c], (vocab, r) for (d_model + 1, r)."""
        main, constant = self._through_norm(self._columns("read", columns), norm)
        coordinates = parallel_matmul(self.table, main.astype(self.table.dtype))  # vocab [d] r
        if self.divisors_of_table is not None:
            coordinates /= self.divisors_of_table.astype(coordinates.dtype)[:, None]
        coordinates += self._bias_read(columns, norm).astype(coordinates.dtype)
        if norm is not None:
            coordinates /= np.sqrt(self._mean_squares(norm) + norm.eps).astype(coordinates.dtype)[:, None]
        coordinates += constant.astype(coordinates.dtype)
        return coordinates

    def read_by_source(
        self, columns: Array, norm: Norm | None, count: int | None = None, *, average: bool = False
    ) -> tuple[Array, Array | None]:
        """Return coordinates along columns [u; c] of every token (vocab, r) and of each learned position (count, r).

        Their sum is the coordinate of a token at a position if norms divide by one number for all of them: the root
        mean square of their divisors. The second is None if positions are not learned. With `average`, the first is the
        mean over tokens (1, r).
        """
        columns = self._columns("read_by_source", columns)
        main, constant = self._through_norm(columns, norm)
        if average:
            of_tokens = self.mean_row[None] @ main  # token [d] r
        else:
            of_tokens = parallel_matmul(self.table, main.astype(self.table.dtype)).astype(np.float64)  # vocab [d] r
        positions = None if self.positions is None else self.positions[:count]
        by, shift = self._typical(positions, norm), self._bias_read(columns, norm)
        if self.norm is not None and norm is not None:  # the norm of the embedding precedes that of the head
            divisor = np.sqrt(self._mean_squares(norm).mean() + norm.eps)
            by, shift = by * divisor, shift / divisor
        return of_tokens / by + shift + constant, None if positions is None else positions @ main / by  # i [d] r

    def second_moments(self, norm: Norm | None) -> Array:
        r"""Return the second moments of the inputs over all tokens t, (d_model + 1, d_model + 1).

        They are the mean of :math:`\tilde x{}^T \tilde x` with :math:`\tilde x = [n(e_t), 1]`.
        """
        total = np.zeros((self.table.shape[1] + 1,) * 2)
        for start in range(0, len(self), _BLOCK):
            x = self._homogeneous(slice(start, start + _BLOCK), norm)
            total += parallel_matmul(x.T, x)  # d~ [token] d~
        return total / len(self)

    def between(self, norm: Norm | None) -> Array:
        r"""Return the sum over tokens t of unembedding times input, :math:`v_t^T \tilde x{}_t`, (d_model, d_model + 1).

        :math:`\tilde x{}_t = [n(e_t), 1]` is the input of a head for token t, :math:`v_t` its row of the unembedding.
        Trace and eigenvalues of the circuit :math:`W_E \mathrm{OV} W_U` of every head follow from this one matrix.
        """
        total = np.zeros((self.table.shape[1], self.table.shape[1] + 1))
        mean = self.unembed.mean(axis=0, dtype=np.float64)
        for start in range(0, len(self), _BLOCK):
            tokens = slice(start, start + _BLOCK)
            x = self._homogeneous(tokens, norm)
            total += parallel_matmul(self.unembed[tokens].T, x)  # d [token] d~
            total -= np.outer(mean, x.sum(axis=0, dtype=np.float64))
        if self.final is None:
            return total
        total = self.final.weight[:, None] * total
        return _centred_columns(total, self.final)

    def write(self, rows: Array) -> Array:
        """Return the changes of all logits for rows (r, d_model) added to the final stream, (r, vocab)."""
        rows = as_array("Vocabulary.write", "rows", rows, ndim=2)
        if rows.shape[1] != self.table.shape[1]:
            raise ArgumentError(
                f"Vocabulary.write: rows must have shape (r, {self.table.shape[1]}), got {rows.shape}; "
                "pass what is added to the final stream."
            )
        if self.final is not None:
            rows = self.final.centre(rows) * self.final.weight
        logits = parallel_matmul(self.unembed, rows.T.astype(self.unembed.dtype)).T  # r [d] vocab
        return np.asarray(logits - logits.mean(axis=1, keepdims=True, dtype=np.float64).astype(logits.dtype))

    def _columns(self, method: str, columns: Array) -> Array:
        """Return columns [u; c] (d_model + 1, r), validated."""
        a = as_array(f"Vocabulary.{method}", "columns", columns, ndim=2)
        if len(a) != self.table.shape[1] + 1:
            raise ArgumentError(
                f"Vocabulary.{method}: columns must have shape ({self.table.shape[1] + 1}, r), got {a.shape}; "
                "the last row reads the constant coordinate, 0 for none."
            )
        return a

    def _mean_squares(self, norm: Norm) -> Array:
        """Return the mean square (vocab,) of every row of the stream, centred if this norm centres."""
        return self.variance if norm.centred else self.mean_square

    def _homogeneous(self, tokens: slice, norm: Norm | None) -> Array:
        """Return [n(e_t), 1] for some tokens, (n, d_model + 1)."""
        x = self.table[tokens]
        x = x if self.norm is None else self.norm(x)
        if norm is not None:
            x = norm.centre(x) / np.sqrt(self._mean_squares(norm)[tokens] + norm.eps)[:, None]
        return np.concatenate([x, np.ones_like(x[:, :1])], axis=1).astype(self.table.dtype)

    def _through_norm(self, columns: Array, norm: Norm | None) -> tuple[Array, Array]:
        """Return columns (d_model, r) with the embedding norm folded in, and the constants (r,)."""
        main = _centred_columns(columns[:-1], norm)
        return main if self.norm is None else _centred_columns(self.norm.weight[:, None] * main, self.norm), columns[-1]

    def _typical(self, positions: Array | None, norm: Norm | None) -> float:
        """Return the root mean square of the divisors of the first norm over all tokens and positions."""
        first = norm if self.norm is None else self.norm
        if first is None:
            return 1.0
        if self.divisors_of_table is not None:
            squares = np.square(self.divisors_of_table)
        else:
            squares = self._mean_squares(first) + first.eps
        if positions is None:
            return float(np.sqrt(squares.mean()))
        mean, p = self.mean_row, positions
        if first.centred:
            mean, p = mean - mean.mean(), p - p.mean(axis=1, keepdims=True)
        return float(np.sqrt(squares.mean() + np.square(p).mean() + 2 * (p.mean(axis=0) * mean).mean()))

    def _bias_read(self, columns: Array, norm: Norm | None) -> Array:
        """Return the coordinates of the embedding norm's bias along columns, (r,)."""
        if self.norm is None or self.norm.bias is None:
            return np.zeros(columns.shape[1])
        return np.asarray(self.norm.bias @ _centred_columns(columns[:-1], norm))


def _centred_columns(columns: Array, norm: Norm | None) -> Array:
    return columns - columns.mean(axis=0) if norm is not None and norm.centred else columns


def as_vocabulary(
    function: str, model: Checkpoint, vocabulary: Inputs | Vocabulary | None, parameter: str = "vocabulary"
) -> Vocabulary:
    """Return the given vocabulary, validated, or load that of the model with the given inputs; None for embeddings."""
    as_one_stream(function, model, "model")
    if vocabulary is None or isinstance(vocabulary, str):
        inputs: Inputs = "embeddings" if vocabulary is None else vocabulary
        check_choice(function, parameter, inputs, get_args(Inputs))
        return with_inputs(model, _read(function, model, "model"), inputs)
    if not isinstance(vocabulary, Vocabulary):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a Vocabulary, got {type(vocabulary).__name__}; "
            "pass read_vocabulary(model)."
        )
    if vocabulary.table.shape[1] != model.sizes.d_model:
        raise ArgumentError(
            f"{function}: {parameter} must have {model.sizes.d_model} features, as the model has, got "
            f"{vocabulary.table.shape[1]}; pass read_vocabulary(model)."
        )
    return vocabulary


def vocabulary_of_logits(
    function: str, model: Checkpoint, vocabulary: Inputs | Vocabulary | None, parameter: str = "vocabulary"
) -> Vocabulary:
    """Return `as_vocabulary` of a model that has an unembedding."""
    words = as_vocabulary(function, model, vocabulary, parameter)
    if not words.ends_in_logits:
        raise ArgumentError(
            f"{function}: model must have an unembedding, got a {model.wiring.model_type}, which ends in hidden "
            "states; load one with a head for tokens."
        )
    return words


@accepts_models
def read_vocabulary(checkpoint: Checkpoint, *, inputs: Inputs = "embeddings") -> Vocabulary:
    """Load the embedding and the unembedding of a checkpoint, in float32 unless they are stored in float64.

    Parameters
    ----------
    checkpoint
        A checkpoint or transformers model that reads tokens. A norm of the embedding is applied to each token alone;
        the first segment embedding, if any, is added to every row.
    inputs
        What heads read for a token: "embeddings", or "first layer", the stream after attention 0 and feed-forward layer
        0 of the token alone, without learned positions.

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
    check_choice("read_vocabulary", "inputs", inputs, get_args(Inputs))
    return with_inputs(checkpoint, _read("read_vocabulary", checkpoint, "checkpoint"), inputs)


def with_inputs(checkpoint: Checkpoint, words: Vocabulary, inputs: Inputs) -> Vocabulary:
    """Return a vocabulary of embeddings with other inputs."""
    if inputs == "embeddings":
        return words
    weights = read_weights(checkpoint, in_memory=False, dtype=words.table.dtype)
    # the first attention, and the feed-forward layers before the second
    layer = [block for block, _ in takewhile(lambda named: "1" not in named[1], named_blocks(weights.blocks))]
    table = np.empty_like(words.table)
    for start in range(0, len(words), _BLOCK):
        x = words.rows(np.arange(start, min(start + _BLOCK, len(words))))
        for block in layer:
            x = block.run(x, _alone)
        table[start : start + _BLOCK] = x
    return replace(words, table=table, norm=None, positions=None, inputs=inputs)


def _alone(layer: Attention, x: Array) -> Array:
    """Return the output of attention (tokens, d_model) where every token attends to itself alone."""
    return layer.output_of_values(layer.repeated(layer.values(x)))


def _read(function: str, checkpoint: Checkpoint, parameter: str) -> Vocabulary:
    wiring = as_one_stream(function, checkpoint, parameter).wiring
    if wiring.reads != "tokens":
        raise ArgumentError(
            f"{function}: {parameter} must read tokens, got a {wiring.model_type}, which reads {wiring.reads}; "
            "its heads have no token space."
        )
    info = checkpoint.locate(wiring.embedding.table.weight)
    stored = np.dtype(np.float64 if info is not None and info.dtype == "F64" else np.float32)
    embedding = read_embedding(checkpoint)
    head = read_unembedding(checkpoint, embedding.tokens)
    table = embedding.tokens if embedding.segment is None else embedding.tokens + embedding.segment
    table = table.astype(stored, copy=False)
    shared = wiring.unembedding is not None and wiring.unembedding.shared
    tied = shared and embedding.segment is None and wiring.embedding.scale == 1 and wiring.embedding.widen is None
    return Vocabulary(
        table=table,
        norm=embedding.norm,
        unembed=table if head is None or tied else np.ascontiguousarray(head.affine.weight.T.astype(stored)),
        bias=None if head is None else head.affine.bias,
        cap=None if head is None else head.cap,
        final=None if head is None else read_norm(checkpoint, wiring.final_norm),
        positions=embedding.positions,
        names=token_names(checkpoint.folder.path, function),
        ends_in_logits=head is not None,
    )
