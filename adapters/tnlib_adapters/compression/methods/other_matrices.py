r"""Feed-forward matrices and embeddings as products of low rank, under one budget with the attention.

Their components (`components`) are in the order in which the text misses them, or, without one, of singular values.
Factors that a fit has moved are stored without what their gauge frees, those of plain methods as they are published.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.residual_stream import unembedding
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.components import Components, components
from tnlib_adapters.factors.attention_factors import Piece
from tnlib_adapters.factors.interpolative import pack
from tnlib_adapters.factors.module_factors import is_embedding, mlp_names, on_rows

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


class Matrix:
    """One matrix by its components: ranks as long as they make it smaller, then the matrix as it is."""

    def __init__(self, name: str, weight: Array, n_bias: int, found: Components, *, gauged: bool = False) -> None:
        self.name, self.fixed, self.components = name, n_bias, found
        self._weight, self._gauged = weight, gauged

    def weigh(self, losses: Array) -> None:
        """Take the loss by every component, from gates, in the place of squared singular values."""
        self.components = self.components.weighed(losses)

    @property
    def curves(self) -> list[Curve]:
        """What every rank costs and loses, and the matrix itself."""
        return [self.components.curve(self._weight.size, gauged=self._gauged)]

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
        return self.components.first(rank)

    def packed(self, factors: Sequence[Array]) -> list[Piece]:
        """Return the piece that holds factors of these shapes."""
        if not factors:
            return [Piece("dense", self.name, {"whole": self._weight})]
        if not self._gauged:
            return [Piece("low_rank", self.name, self._cast(*factors))]
        left, right, rows = pack(*(one.astype(np.float64) for one in factors))
        return [Piece("interpolative", self.name, self._cast(left, right), rows=rows)]

    def _cast(self, left: Array, right: Array) -> dict[str, Array]:
        dtype = self._weight.dtype
        return {"left": left.astype(dtype), "right": right.astype(dtype)}


def read_matrix(
    checkpoint: Checkpoint, name: str, reads: Array | None = None, slopes: Array | None = None, *, fitted: bool = False
) -> Matrix:
    """Factorise a module of a checkpoint, by second moments as `components` takes them; `fitted` if a fit follows."""
    row, bias = checkpoint.architecture, checkpoint.locate(f"{name}.bias")
    weight = on_rows(row, name, checkpoint.read(f"{name}.weight"))
    gauged = fitted and not is_embedding(row, name)  # rows of a table are looked up
    return Matrix(name, weight, 0 if bias is None else bias.size, components(weight, reads, slopes), gauged=gauged)
