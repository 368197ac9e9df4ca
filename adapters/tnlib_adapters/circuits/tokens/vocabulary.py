r"""The two ends of a model, the space of tokens: what a direction of the stream is to each token of the vocabulary.

With the row e_t that the stream holds for token t alone, positions left out, and n(x) the division of the norm in
front of a head, a direction u~ = [u, c] that the head reads is to the token

    n(e_t) u + c

and a direction v that the head writes moves its logit by v diag(w) u_t, with the weights w of the final norm and the
unembedding u_t, up to the division of that norm and to what all logits have in common, which softmax does not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count
from tnlib.linalg.threads import parallel_matmul
from tnlib_adapters.reference.layers import Norm

_BLOCK = 4096  # tokens whose rows are widened at a time


@dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """Tokens as the stream holds them, and as logits read them; made by `read_vocabulary`, once for many heads.

    Parameters
    ----------
    table
        (vocab, d_model), the embedding of each token as the stream has it, without positions.
    norm
        Of the embedding, or None; it is applied to each token alone.
    divisors_of_table
        (vocab,), what that norm divides by, or None.
    mean_row
        (d_model,), the mean of the table.
    mean_square, variance
        (vocab,), of each row of the stream, behind that norm.
    unembed
        (vocab, d_model); `table` itself where the two are tied.
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
    """

    table: Array
    norm: Norm | None
    divisors_of_table: Array | None
    mean_row: Array
    mean_square: Array
    variance: Array
    unembed: Array
    bias: Array | None
    cap: float | None
    final: Norm | None
    positions: Array | None
    names: dict[int, str] | None
    ends_in_logits: bool

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        named = "" if self.names is None else ", with their text"
        tied = ", tied" if self.unembed is self.table and self.ends_in_logits else ""
        return f"Vocabulary({len(self)} tokens of {self.table.shape[1]} features{tied}{named})"

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
        number = as_count("Vocabulary.name", "token", token, least=0)
        text = None if self.names is None else self.names.get(number)
        return str(number) if text is None else repr(text)

    def rows(self, tokens: Array) -> Array:
        """Return what the stream holds of tokens (n,) alone, (n, d_model)."""
        x = self.table[tokens]
        return x if self.norm is None else self.norm(x)

    def read(self, columns: Array, norm: Norm | None) -> Array:
        """Return n(e_t) u + c of every token for columns [u; c], (vocab, r) for (d_model + 1, r)."""
        main, constant = self._through_norm(self._columns("read", columns), norm)
        found = parallel_matmul(self.table, main.astype(self.table.dtype))  # vocab [d] r
        if self.divisors_of_table is not None:
            found /= self.divisors_of_table.astype(found.dtype)[:, None]
        found += self._bias_read(columns, norm).astype(found.dtype)
        if norm is not None:
            found /= np.sqrt(self._mean_squares(norm) + norm.eps).astype(found.dtype)[:, None]
        found += constant.astype(found.dtype)
        return found

    def read_apart(
        self, columns: Array, norm: Norm | None, count: int | None = None, *, average: bool = False
    ) -> tuple[Array, Array | None]:
        """Return what columns [u; c] read of every token (vocab, r), and of each learned position (count, r).

        The sum of the two is what is read of a token at a position, when norms divide by one number for all of them,
        the root mean square of what they would divide by. The second is None where positions are not learned;
        `average` returns the mean over tokens (1, r) as the first.
        """
        columns = self._columns("read_apart", columns)
        main, constant = self._through_norm(columns, norm)
        if average:
            of_tokens = self.mean_row[None] @ main  # token [d] r
        else:
            of_tokens = parallel_matmul(self.table, main.astype(self.table.dtype)).astype(np.float64)  # vocab [d] r
        positions = None if self.positions is None else self.positions[:count]
        by, shift = self._typical(positions, norm), self._bias_read(columns, norm)
        if self.norm is not None and norm is not None:  # a norm behind a norm
            behind = np.sqrt(self._mean_squares(norm).mean() + norm.eps)
            by, shift = by * behind, shift / behind
        return of_tokens / by + shift + constant, None if positions is None else positions @ main / by  # i [d] r

    def second_moments(self, norm: Norm | None) -> Array:
        """Return the mean over tokens of x~^T x~ with x~ = [n(e_t), 1], (d_model + 1, d_model + 1)."""
        total = np.zeros((self.table.shape[1] + 1,) * 2)
        for start in range(0, len(self), _BLOCK):
            x = self._homogeneous(slice(start, start + _BLOCK), norm)
            total += parallel_matmul(x.T, x)  # d~ [token] d~
        return total / len(self)

    def between(self, norm: Norm | None) -> Array:
        """Return the sum over tokens of v_t^T x~_t, (d_model, d_model + 1): what logits of tokens have of themselves.

        x~_t = [n(e_t), 1] is what is read of a token, v_t what its logit reads of the final stream. The circuit of
        every head, W_E OV W_U, has its trace and its eigenvalues from this one matrix.
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
        return _centred(total, self.final)

    def write(self, rows: Array) -> Array:
        """Return what rows (r, d_model), added to the final stream, add to every logit, (r, vocab)."""
        rows = as_array("Vocabulary.write", "rows", rows, ndim=2)
        if rows.shape[1] != self.table.shape[1]:
            raise ArgumentError(
                f"Vocabulary.write: rows must have shape (r, {self.table.shape[1]}), got {rows.shape}; "
                "pass what is added to the final stream."
            )
        if self.final is not None:
            rows = self.final.centre(rows) * self.final.weight
        found = parallel_matmul(self.unembed, rows.T.astype(self.unembed.dtype)).T  # r [d] vocab
        return np.asarray(found - found.mean(axis=1, keepdims=True, dtype=np.float64).astype(found.dtype))

    def _columns(self, method: str, columns: Array) -> Array:
        """Return columns [u; c] (d_model + 1, r) that fit the table."""
        a = as_array(f"Vocabulary.{method}", "columns", columns, ndim=2)
        if len(a) != self.table.shape[1] + 1:
            raise ArgumentError(
                f"Vocabulary.{method}: columns must have shape ({self.table.shape[1] + 1}, r), got {a.shape}; "
                "the last row reads the constant coordinate, 0 for none."
            )
        return a

    def _mean_squares(self, norm: Norm) -> Array:
        """Return the mean square (vocab,) of every row of the stream once it is centred for this norm."""
        return self.variance if norm.centred else self.mean_square

    def _homogeneous(self, tokens: slice, norm: Norm | None) -> Array:
        """Return [n(e_t), 1] of some tokens, (n, d_model + 1)."""
        x = self.table[tokens]
        x = x if self.norm is None else self.norm(x)
        if norm is not None:
            x = norm.centre(x) / np.sqrt(self._mean_squares(norm)[tokens] + norm.eps)[:, None]
        return np.concatenate([x, np.ones_like(x[:, :1])], axis=1).astype(self.table.dtype)

    def _through_norm(self, columns: Array, norm: Norm | None) -> tuple[Array, Array]:
        """Return columns (d_model, r) as they meet the table, and their constants."""
        main = _centred(columns[:-1], norm)
        return main if self.norm is None else _centred(self.norm.weight[:, None] * main, self.norm), columns[-1]

    def _typical(self, positions: Array | None, norm: Norm | None) -> float:
        """Return the root mean square of what the first norm divides by, over all tokens at all positions."""
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
        """Return what columns read of the bias of the embedding's norm, (r,)."""
        if self.norm is None or self.norm.bias is None:
            return np.zeros(columns.shape[1])
        return np.asarray(self.norm.bias @ _centred(columns[:-1], norm))


def _centred(columns: Array, norm: Norm | None) -> Array:
    return columns - columns.mean(axis=0) if norm is not None and norm.centred else columns
