r"""Block-wise reconstruction with rounded weights: codes, scales and biases are fitted to the original block.

Every rounded weight is a function of a float matrix W and of its scales s,

    W'_ij = s_ij code_ij - m_ij,        code_ij = round((W_ij + m_ij) / s_ij), within the codes of the format,

with a minimum m_ij that is stored too, or s_ij times the code of 0. The derivative with respect to W is taken as 1
where the code is not clipped, and with respect to s with the code fixed up to the clipped rounding error (Esser et al.,
Learned step size quantization, ICLR 2020). Gradient descent on the squared difference at the output of a block moves
both, and the biases of the attention, first block to last; no gradient leaves the block. W starts between the rounded
value and the nearest point of its cell to the original, so that codes near a boundary can change. Parts of a weight are
rounded one by one. The weights of a block, as rounded or as fitted, are chosen on held-out batches by the stream six
blocks later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tnlib._typing import Array
from tnlib_adapters.factors.expansion import weight_of_parts
from tnlib_adapters.factors.integers import IntegerFormat, Integers
from tnlib_adapters.factors.projections import Projections
from tnlib_adapters.instrument.block import Block, as_array, as_tensor
from tnlib_adapters.instrument.layer_fit import FitStreams, adam

_RATE = 0.012  # learning rate of the weights, in steps of their grid
_SCALE_RATE = 0.0012  # of the scales, relative
_BIAS_RATE = 0.003  # of biases, relative to their root mean square


@dataclass(frozen=True)
class RoundedBlock:
    """Rounded weights of one block, by projection or module name, and the biases of its attention.

    A weight is one rounded matrix or a product of two, see `weight_of_parts`. `originals` are the matrices before they
    were rounded.
    """

    rounded: Mapping[str, tuple[Integers, ...]]
    originals: Mapping[str, tuple[Array, ...]]
    biases: Mapping[str, Array]


class _Grid:
    """A weight (m, n) that is rounded in the forward pass, around rounded values with weights in their cells.

    `moves` are those of the weights, in steps, and of the scales, relative to themselves.
    """

    def __init__(self, integers: Integers, original: Array, device: torch.device) -> None:
        self._form, self._scales = integers.format, as_tensor(integers.scales, device)  # as stored
        values = as_tensor(integers.values(), device)
        half = steps_and_minima(self._form, self._scales, values.shape)[0].abs() / 2
        nearest = torch.minimum(torch.maximum(as_tensor(original, device), values - half), values + half)
        self._weight = (values + nearest) / 2
        self.moves = tuple(torch.zeros_like(a, requires_grad=True) for a in (self._weight, self._scales))

    def values(self) -> Tensor:
        """Return the rounded weight after the moves."""
        low, high = self._form.code_range
        steps, minima = steps_and_minima(self._form, self._moved_scales(), self._weight.shape)
        inside = ((self._moved_weight() + minima) / _divisors(steps)).clamp(low, high)
        codes = inside + (torch.floor(inside + 0.5).clamp(low, high) - inside).detach()
        return steps * codes - minima

    def integers(self) -> Integers:
        """Return the codes and scales after the moves."""
        with torch.no_grad():
            scales = self._form.stored_scales(self._moved_scales().cpu().numpy())
            stored = as_tensor(scales, self._weight.device)
            steps, minima = steps_and_minima(self._form, stored, self._weight.shape)
            low, high = self._form.code_range
            codes = torch.floor((self._moved_weight() + minima) / _divisors(steps) + 0.5).clamp(low, high)
        return Integers(codes.cpu().numpy().astype(np.uint8 if self._form.is_packed else np.int8), scales, self._form)

    def _moved_weight(self) -> Tensor:
        return self._weight + self.moves[0] * steps_and_minima(self._form, self._scales, self._weight.shape)[0]

    def _moved_scales(self) -> Tensor:
        return self._scales * (1 + self.moves[1])


class MovedVector:
    """A vector, and its change in units of its root mean square."""

    def __init__(self, start: Tensor) -> None:
        self.start, self._unit = start, start.square().mean().sqrt()
        self.move = torch.zeros_like(start, requires_grad=True)

    def values(self) -> Tensor:
        """Return the vector after the move."""
        return self.start + self._unit * self.move

    def store_move(self) -> None:
        """Take over the move."""
        self.start = self.values()


def steps_and_minima(form: IntegerFormat, scales: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the scale of every entry of a matrix, and its value at code 0 with the sign changed."""
    (axis,) = form.axes
    sizes = torch.tensor(form.group_sizes(shape[axis]), device=scales.device)
    steps, *minima = scales.chunk(1 + form.has_minimum, axis)
    steps, *minima = (part.repeat_interleave(sizes, axis) for part in (steps, *minima))
    return steps, minima[0] if minima else steps * form.centre


def _divisors(steps: Tensor) -> Tensor:
    """Return the steps, and 1 in groups of zeros, whose scale is 0."""
    return torch.where(steps == 0, 1.0, steps)


class RoundedFit:
    """Fit of the rounded weights of a block; `start` returns them."""

    def __init__(self, start: Callable[[int], RoundedBlock]) -> None:
        self.start = start

    def weights(self, block: Block, fitted: RoundedBlock) -> dict[str, Tensor]:
        """Return the weights of the block."""
        values = {
            name: weight_of_parts([as_tensor(integers.values(), block.model.device) for integers in parts])
            for name, parts in fitted.rounded.items()
        }
        biases: dict[str, Any] = {name: as_tensor(bias, block.model.device) for name, bias in fitted.biases.items()}
        return block.of_weights(Projections(values, biases))

    def candidates(
        self, block: Block, streams: FitStreams, start: RoundedBlock, order: Sequence[int]
    ) -> Sequence[Callable[[], RoundedBlock]]:
        """Return the weights as rounded, and as fitted; () if none is rounded."""
        if not start.rounded:
            return ()
        fitted = _fitted(block, streams, start, order)
        return (lambda: start), (lambda: fitted)


def _fitted(block: Block, streams: FitStreams, start: RoundedBlock, order: Sequence[int]) -> RoundedBlock:
    """Return the weights and biases after one step of Adam on every batch of `order`."""
    device = block.model.device
    grids = {
        name: [_Grid(*pair, device) for pair in zip(integers, start.originals[name], strict=True)]
        for name, integers in start.rounded.items()
    }
    biases = {name: MovedVector(as_tensor(bias, device)) for name, bias in start.biases.items()}

    def parameters() -> dict[str, Tensor]:
        values = {name: weight_of_parts([grid.values() for grid in parts]) for name, parts in grids.items()}
        moved: dict[str, Any] = {name: bias.values() for name, bias in biases.items()}
        return block.of_weights(Projections(values, moved))

    all_moves = [grid.moves for parts in grids.values() for grid in parts]
    groups: list[Any] = [
        {"params": [move[0] for move in all_moves], "lr": _RATE},
        {"params": [move[1] for move in all_moves], "lr": _SCALE_RATE},
        {"params": [bias.move for bias in biases.values()], "lr": _BIAS_RATE},
    ]
    adam(block, streams, [group for group in groups if group["params"]], parameters, _RATE, order)
    moved = {name: as_array(bias.values().detach()) for name, bias in biases.items()}
    rounded = {name: tuple(grid.integers() for grid in parts) for name, parts in grids.items()}
    return RoundedBlock(rounded, start.originals, moved)
