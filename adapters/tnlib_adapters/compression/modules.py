r"""Feed-forward matrices and embeddings as products of low rank, under one budget with the attention.

Their components (`components`) are in the order in which the text misses them, or, without one, of singular values.
Factors that a fit has moved are stored without what their gauge frees, those of plain methods as they are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.attention.stream import unembedding
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.checkpoints.interpolative import pack
from tnlib_adapters.checkpoints.modules import is_embedding, mlp_names, on_rows
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.components import components

# of models of masked words, which predict by their embeddings: where BERT and RoBERTa keep the rest of that head
_MASKED_HEADS = ("cls.predictions.", "lm_head.")


def names_of(checkpoint: Checkpoint, what: str) -> list[str]:
    """Return the modules outside the attention that `what` ("attention", "mlp", "all") means.

    Embeddings that also make the predictions are one matrix in two roles, and stay; so do those that are scaled when
    they are looked up.
    """
    if what == "attention":
        return []
    found = mlp_names(checkpoint.architecture, range(checkpoint.n_layers))
    return [*found, checkpoint.architecture.embeddings[0]] if what == "all" and _has_a_table(checkpoint) else found


def _has_a_table(checkpoint: Checkpoint) -> bool:
    """Whether there are embeddings of tokens that make no predictions: a copy may stand where both are one."""
    row = checkpoint.architecture
    if row.reads != "tokens" or row.embedding_scale:  # a module of its own kind, that multiplies what it looks up
        return False
    head = unembedding(checkpoint)
    if head is None and not any(name.startswith(_MASKED_HEADS) for name in checkpoint.folder.tensors):
        return True
    return head != row.embeddings[0] and row.get(checkpoint.config, "tie_word_embeddings") is False


def widest_input(checkpoint: Checkpoint, what: str) -> int:
    """Return the inputs of the weight of `what` that has the most; tables have none."""
    row = checkpoint.architecture
    widths = [] if what == "mlp" else [checkpoint.sizes.widths["o"]]
    for name in names_of(checkpoint, what):
        found = checkpoint.locate(f"{name}.weight")
        if found is not None and not is_embedding(row, name):
            widths.append(found.shape[1 if row.stored == "out_in" else 0])
    return max(widths)


@dataclass(frozen=True)
class Seen:
    """Sums over tokens of one module: x x^T of what it reads, of an embedding counts alone; p p^T at what it writes."""

    reads: Array
    slopes: Array | None = None  # None: all outputs matter alike


class Matrix:
    """One matrix: ranks as long as its factors are smaller than itself, then the matrix as it is.

    `gauged` says that the r^2 numbers which the gauge of a product frees are not stored, but r places of rows.
    """

    def __init__(
        self, name: str, weight: Array, n_bias: int, seen: Seen | None = None, *, gauged: bool = False
    ) -> None:
        self.name, self.fixed = name, n_bias
        self._weight, self._gauged = weight, gauged
        self.components = components(weight, *((None, None) if seen is None else (seen.reads, seen.slopes)))

    def weigh(self, losses: Array) -> None:
        """Take the loss by every component, from gates, in the place of squared singular values."""
        self.components = self.components.weighed(losses)

    @property
    def curves(self) -> list[Curve]:
        """What every rank costs and loses, and the matrix itself."""
        r = np.arange(len(self.components.losses) + 1)
        costs = r * sum(self._weight.shape) + ((r - r**2) if self._gauged else 0)
        smaller = costs < self._weight.size
        losses = np.append(self.components.lost[smaller], 0.0)
        return [Curve(np.append(costs[smaller], self._weight.size), losses)]

    @property
    def n_before(self) -> int:
        """Numbers of the matrix as it came, and of its bias."""
        return self._weight.size + self.fixed

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors of rank choice[0], or the matrix, which is the last option."""
        return self.packed(self.factors(choice))

    def factors(self, choice: Sequence[int]) -> tuple[Array, ...]:
        """Return the same as matrices to be multiplied, none where the matrix stays as it is."""
        rank = choice[0]
        if rank == len(self.curves[0].costs) - 1:
            return ()
        return self.components.left[:, :rank], self.components.right[:rank]

    def packed(self, factors: Sequence[Array]) -> list[Piece]:
        """Return the piece that holds factors of these shapes."""
        if not factors:
            return [Piece("dense", self.name, {"whole": self._weight})]
        left, right = factors
        kind, rows = "low_rank", tuple[int, ...]()
        if self._gauged:
            kind, (left, right, rows) = "interpolative", pack(left.astype(np.float64), right.astype(np.float64))
        dtype = self._weight.dtype
        return [Piece(kind, self.name, {"left": left.astype(dtype), "right": right.astype(dtype)}, rows=rows)]


def read_matrices(
    checkpoint: Checkpoint, names: Sequence[str], seen: Sequence[Seen] | None = None, *, fitted: bool = False
) -> list[Matrix]:
    """Factorise these modules of a checkpoint; `fitted` if a fit follows, which looks no tables up."""
    row, found = checkpoint.architecture, []
    for k, name in enumerate(names):
        weight = on_rows(row, name, checkpoint.read(f"{name}.weight"))
        bias = checkpoint.locate(f"{name}.bias")
        gauged = fitted and not is_embedding(row, name)
        n_bias = 0 if bias is None else bias.size
        found.append(Matrix(name, weight, n_bias, None if seen is None else seen[k], gauged=gauged))
    return found
