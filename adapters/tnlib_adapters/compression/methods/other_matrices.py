r"""Matrices of attention on latent vectors, of feed-forward layers and embeddings, under one budget with attention.

Components are ordered by calibration data, or by singular values without a text. Fitted factors are stored without
gauge freedom, those of the plain methods as published.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.components import Components, components
from tnlib_adapters.compression.methods.table import ATTENTION, EMBEDDING, FEED_FORWARD
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.interpolative import pack


def names_of(checkpoint: Checkpoint, what: str) -> list[str]:
    """Return the modules that `what` ("attention", "mlp", "all") selects, besides projections of attention.

    They include all matrices of attention on latent vectors. Embeddings are not selected if they also make the
    predictions, are scaled at look-up, or several modules hold them.
    """
    names = []
    for layer in checkpoint.wiring.layers:
        names += [matrix.name for matrix in layer.latent_matrices if what != "mlp"]
        names += [matrix.name for matrix in layer.feed_forward_matrices if what != "attention"]
    with_table = what == "all" and _has_separate_embedding(checkpoint)
    return [*names, checkpoint.wiring.embedding.table.name] if with_table else names


def compressed_weights(checkpoint: Checkpoint, what: str) -> set[str]:
    """Return the tensor names of the weights that `what` selects, without biases."""
    wiring = checkpoint.wiring
    layers = wiring.projection_layers(what)
    attention = {linear.weight for k in layers for linear in wiring.layers[k].attention.projections.values()}
    return attention | {wiring.matrices[name].weight for name in names_of(checkpoint, what)}


def _has_separate_embedding(checkpoint: Checkpoint) -> bool:
    """Return True if there are token embeddings, unscaled, that do not make the predictions."""
    wiring = checkpoint.wiring
    embedding = wiring.embedding
    if wiring.reads != "tokens" or embedding.shared or embedding.scale != 1:  # scaled ones are another class of module
        return False
    if wiring.unembedding is None:
        return wiring.masked_head is None
    return not wiring.unembedding.tied


def widest_input(checkpoint: Checkpoint, what: str) -> int:
    """Return the largest input width among the weights of `what`, tables excluded."""
    widths = [checkpoint.sizes.widths["o"]] if checkpoint.wiring.projection_layers(what) else []
    for name in names_of(checkpoint, what):
        weight = checkpoint.locate(f"{name}.weight")
        if weight is not None and not checkpoint.wiring.is_embedding(name):
            widths.append(weight.shape[checkpoint.wiring.matrices[name].input_axis])
    return max(widths)


class Matrix:
    """A matrix by its components: its factors while smaller than the matrix, then the dense matrix."""

    def __init__(
        self, name: str, weight: Array, n_bias: int, weight_components: Components, *, gauged: bool = False
    ) -> None:
        self.name, self.fixed, self.components = name, n_bias, weight_components
        self._weight, self._gauged = weight, gauged

    def weigh(self, losses: Array) -> None:
        """Replace squared singular values by losses from gates."""
        self.components = self.components.weighed(losses)

    @property
    def curves(self) -> list[Curve]:
        """Curve of all ranks, then of the dense matrix."""
        return [self.components.curve(self._weight.size, gauged=self._gauged)]

    @property
    def n_before(self) -> int:
        """Numbers of the dense matrix and its bias."""
        return self._weight.size + self.fixed

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors of rank choice[0]; the last option is the dense matrix."""
        return self.packed(self.factors(choice))

    def factors(self, choice: Sequence[int]) -> tuple[Array, ...]:
        """Return the factors as matrices to be multiplied; () for the dense matrix."""
        rank = choice[0]
        if rank == len(self.curves[0].costs) - 1:
            return ()
        return self.components.first(rank)

    def packed(self, factors: Sequence[Array]) -> list[FactoredMatrix]:
        """Return the factored matrix with these factors."""
        if not factors:
            return [FactoredMatrix("dense", "", {whole_part(""): self._weight})]
        if not self._gauged:
            return [FactoredMatrix("low_rank", "", self._cast(*factors))]
        left, right, rows = pack(*(factor.astype(np.float64) for factor in factors))
        return [FactoredMatrix("interpolative", "", self._cast(left, right), rows=rows)]

    def _cast(self, left: Array, right: Array) -> dict[str, Array]:
        dtype = self._weight.dtype
        return {"left": left.astype(dtype), "right": right.astype(dtype)}


def role_of(wiring: Wiring, name: str) -> str:
    """Return `ATTENTION`, `FEED_FORWARD` or `EMBEDDING`, the role of a module of `names_of`."""
    if any(name == matrix.name for layer in wiring.layers for matrix in layer.latent_matrices):
        return ATTENTION
    return EMBEDDING if wiring.is_embedding(name) else FEED_FORWARD


def read_weight(checkpoint: Checkpoint, name: str) -> tuple[Array, int]:
    """Return the weight of a module as (in, out), and the size of its bias."""
    bias = checkpoint.locate(f"{name}.bias")
    weight: Array = checkpoint.wiring.matrices[name].on_rows(checkpoint.read(f"{name}.weight"))
    return weight, 0 if bias is None else bias.size


def read_matrix(checkpoint: Checkpoint, name: str, reads: Array, slopes: Array) -> Matrix:
    """Decompose a module's weight into components by second moments of its inputs and of gradients at its output."""
    weight, n_bias = read_weight(checkpoint, name)
    gauged = not checkpoint.wiring.is_embedding(name)  # a look-up needs all rows of the left factor
    return Matrix(name, weight, n_bias, components(weight, reads, slopes), gauged=gauged)
