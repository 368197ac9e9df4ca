r"""Feed-forward matrices and embeddings as products of low rank, under one budget with the attention.

Their components (`components`) are in the order in which the text misses them, or, without one, of singular values.
Factors that a fit has moved are stored without what their gauge frees, those of plain methods as they are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.checkpoints.interpolative import pack
from tnlib_adapters.checkpoints.modules import is_embedding, mlp_names, on_rows
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.components import components
from tnlib_adapters.compression.moments import second_moments
from tnlib_adapters.compression.progress import Progress, quiet

if TYPE_CHECKING:
    from tnlib_adapters.torch.hooks.running import Batch, RunningModel

_SEED = 2
# One more than the attention takes: with 400 sentences and half of MiniLM's feed-forward layers kept, the second, which
# costs a backward pass, takes 6 % of the error on other text away, before the fit (0.0880 to 0.0827).
_PROBES = 2


def names_of(checkpoint: Checkpoint, what: str) -> list[str]:
    """Return the modules outside the attention that `what` ("attention", "mlp", "all") means.

    Embeddings that also make the predictions are one matrix in two roles, and stay.
    """
    row = checkpoint.architecture
    if what == "attention":
        return []
    found = mlp_names(row, range(checkpoint.n_layers))
    return found if what == "mlp" or row.unembed or row.reads != "tokens" else [*found, row.embeddings[0]]


@dataclass(frozen=True)
class Seen:
    """Sums over tokens of one module: x x^T of what it reads, of an embedding counts alone; p p^T at what it writes."""

    reads: Array
    slopes: Array | None  # None: all outputs matter alike


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


def collect_matrices(
    model: RunningModel, names: Sequence[str], batches: Sequence[Batch], progress: Progress = quiet
) -> list[Seen]:
    """Return what these modules read and how their outputs matter, over the batches."""
    import torch

    from tnlib_adapters.torch.hooks.matrices import observe_modules

    sums: dict[int, tuple[Array, Array]] = {}
    generator = torch.Generator().manual_seed(_SEED)
    for done, batch in enumerate(batches):
        progress("reading matrices", done, len(batches))
        for k, (read, wrote) in enumerate(observe_modules(model, names, batch, _PROBES, generator)):
            slopes = second_moments(wrote).astype(np.float64)
            if is_embedding(model.row, names[k]):
                size = model.model.get_input_embeddings().weight.shape[0]
                reads = np.bincount(batch.ids[batch.valid].numpy(), minlength=size).astype(np.float64)
            else:
                reads = second_moments(read).astype(np.float64)
            sums[k] = (sums[k][0] + reads, sums[k][1] + slopes) if done else (reads, slopes)
    progress("reading matrices", len(batches), len(batches))
    return [Seen(*sums[k]) for k in range(len(names))]


def weigh_matrices(
    model: RunningModel, matrices: Sequence[Matrix], batches: Sequence[Batch], progress: Progress = quiet
) -> None:
    """Give every component of these matrices the mean square of the derivative by a gate on it."""
    import torch

    from tnlib_adapters.torch.hooks.matrices import observe_modules

    names = [one.name for one in matrices]
    sides = [tuple(side.astype(np.float32) for side in (one.components.left, one.components.right)) for one in matrices]
    sums = [np.zeros(len(right)) for _, right in sides]
    generator, count = torch.Generator().manual_seed(_SEED + 1), 0
    for done, batch in enumerate(batches):
        progress("weighing matrices", done, len(batches))
        for k, (read, wrote) in enumerate(observe_modules(model, names, batch, _PROBES, generator)):
            left, right = sides[k]
            on_left = left[batch.ids.numpy()] if is_embedding(model.row, names[k]) else read @ left  # b t [i] c
            on_right = wrote @ right.T  # p b t [o] c
            slopes = np.sum(on_left * on_right, axis=2)  # p b [t] c
            sums[k] += np.sum(np.square(slopes, dtype=np.float64), axis=(0, 1))
        count += _PROBES * (batch.n_tokens if model.predicts else len(batch.ids))
    progress("weighing matrices", len(batches), len(batches))
    for one, total in zip(matrices, sums, strict=True):
        one.weigh(total / count)
