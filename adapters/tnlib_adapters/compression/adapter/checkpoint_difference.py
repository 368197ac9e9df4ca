"""Difference of two checkpoints of one model: of the weights that an adapter holds, and of all other tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Linear
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.files.tensor_file import FLOATS


def adaptable_weights(checkpoint: Checkpoint) -> dict[str, Linear]:
    """Return the weights of attention and feed-forward layers, by module with its prefix."""
    layers = checkpoint.wiring.layers
    linears = [linear for k in layers for linear in (*k.attention.matrices, *k.feed_forward_matrices)]
    return {linear.module: linear for linear in linears}


@dataclass(frozen=True)
class CheckpointDifference:
    """A fine-tuned checkpoint minus its base; tensors are read one at a time.

    Raises
    ------
    ArgumentError
        If they differ in more than numbers.
    """

    base: Checkpoint
    tuned: Checkpoint

    def __post_init__(self) -> None:
        for checkpoint in (self.base, self.tuned):
            if checkpoint.factored is not None:
                raise ArgumentError(
                    f"extract_adapter: BASE and TUNED must hold whole weights, got the factors of "
                    f"{checkpoint.folder.path}; compress it with layout='dense'."
                )
        shapes = [self._shapes(checkpoint) for checkpoint in (self.base, self.tuned)]
        if self.base.wiring.model_type != self.tuned.wiring.model_type or shapes[0] != shapes[1]:
            names = sorted(shapes[0].keys() | shapes[1].keys())
            other = [name for name in names if shapes[0].get(name) != shapes[1].get(name)]
            where = f", which differ in the shape of {other[0]!r}" if other else ""
            raise ArgumentError(
                f"extract_adapter: BASE and TUNED must be of one architecture and size, got a "
                f"{self.base.wiring.model_type} and a {self.tuned.wiring.model_type}{where}; pass the checkpoint that "
                "was fine-tuned and the result."
            )

    @cached_property
    def weights(self) -> dict[str, Linear]:
        """Weights that an adapter holds, by module with its prefix: of attention and feed-forward layers."""
        return adaptable_weights(self.base)

    def of_weight(self, module: str) -> Array:
        """Return the difference of a weight, (out, in), in float64."""
        linear = self.weights[module]
        difference: Array = linear.on_rows(self._of_tensor(linear.weight)).T
        return difference

    def squares_outside(self) -> dict[str, float]:
        """Return the squared norm of the difference of every other tensor that differs."""
        held = {linear.weight for linear in self.weights.values()}
        names = [name for name, info in self.base.folder.tensors.items() if name not in held and info.dtype in FLOATS]
        squares = {name: float(np.sum(np.square(self._of_tensor(name)))) for name in names}
        return {name: square for name, square in squares.items() if square > 0}

    def _of_tensor(self, name: str) -> Array:
        old, new = (c.folder.tensors[name].read_finite().astype(np.float64) for c in (self.base, self.tuned))
        difference: Array = new - old
        return difference

    @staticmethod
    def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in checkpoint.folder.tensors.items()}
