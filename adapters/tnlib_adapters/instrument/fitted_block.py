"""Weights of a block that are fitted, codes, scales, factors, biases and other vectors, and the descent of these.

Codes are moved as floats that the forward pass rounds, with a derivative of 1, from the middle of their cells. With 2
bits 2 % of those of the built-in Llama change, and 0.2 % of those of SmolLM2: those whose gradients are large for their
row and column, and keep their sign. Adam moves scales relative to themselves, biases and gains of norms, as Chen et al.
(EfficientQAT, ACL 2025) do in their second phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tnlib._typing import Array
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.integers import IntegerFormat, Integers
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.instrument.block import Block, Weights, as_array, as_tensor
from tnlib_adapters.instrument.block_passes import Call

_WARM_UP = 10  # steps in which rates rise
_CODE_RATE = 0.04  # most of codes, in their unit, for gradients of size 1: with 0.05 SmolLM2 in 2 bits diverges
_CODE_WALK = 0.32  # rate times the root of the number of steps: how far codes would walk along random gradients
# Steps of factors, relative to their size, of which the first that doubles the error is taken, and its share in a step
_TRIED_STEPS, _FACTOR_SHARE = [2.0**k for k in range(-14, -1)], 1 / 6
_LARGEST_GRADIENT = 3.0  # gradient of an entry, relative to the root mean square
_MEMORY = 0.99  # of mean squares, for each step
_SMALLEST = 1e-30


class Descent:
    """Descent of a matrix by gradients relative to their root mean square, a step in every backward pass.

    Mean squares are products of one number for a row and one for a column (Shazeer and Stern, Adafactor, 2018): those
    of Adam, and its momentum, would take twice the memory of the matrix, and gain nothing, neither for codes nor for
    factors of the built-in Llama. Adafactor of torch moves by the size of the entries themselves, which of codes grows
    with the bits. A gradient is freed before those of other blocks are computed. Entries are clamped to `bounds`: a
    code far beyond its range would take many steps to come back. The matrix is not held: its hook holds this object,
    and torch would free neither.
    """

    rate = 0.0  # of the next step, in `unit`

    def __init__(self, matrix: Tensor, unit: float = 1.0, bounds: tuple[float, float] | None = None) -> None:
        self._unit, self._bounds = unit, bounds
        self._rows, self._columns = (torch.zeros(n, device=matrix.device) for n in matrix.shape)
        self._n_steps = 0
        matrix.register_post_accumulate_grad_hook(self.step)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, matrix: Tensor) -> None:
        """Move the matrix against its gradient, and free it."""
        gradient, matrix.grad = cast(Tensor, matrix.grad), None
        self._n_steps += 1
        squares = gradient.square()
        self._rows.lerp_(squares.mean(1), 1 - _MEMORY)
        self._columns.lerp_(squares.mean(0), 1 - _MEMORY)
        mean = self._rows.mean().clamp(min=_SMALLEST)
        squares = torch.outer(self._rows / mean, self._columns / (1 - _MEMORY**self._n_steps))
        scale = squares.sqrt_().clamp_(min=_SMALLEST)
        # with a few outliers at once the fit would diverge
        matrix.sub_(gradient.div_(scale).clamp_(-_LARGEST_GRADIENT, _LARGEST_GRADIENT), alpha=self.rate * self._unit)
        if self._bounds is not None:
            matrix.clamp_(*self._bounds)

    def forget(self) -> None:
        """Forget all gradients."""
        self._rows.zero_()
        self._columns.zero_()
        self._n_steps = 0


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


class MovedIntegers:
    """Codes of a matrix, as floats that are rounded, their scales, and relative changes of these."""

    def __init__(self, integers: Integers, device: torch.device) -> None:
        self._form, self._dtype = integers.format, integers.codes.dtype
        self.codes = as_tensor(integers.codes, device).requires_grad_()
        self.scales = as_tensor(integers.scales, device)
        self.move = torch.zeros_like(self.scales, requires_grad=True)
        low, high = self._form.code_range
        self.descent = Descent(self.codes, bounds=(low - 0.5, high + 0.5))

    def values(self) -> Tensor:
        """Return the values of the rounded codes."""
        steps, minima = steps_and_minima(self._form, self.scales * (1 + self.move), self.codes.shape)
        rounded = self.codes + (self._rounded() - self.codes).detach()
        return steps * rounded - minima

    def store_move(self) -> None:
        """Round the codes, and move the scales to values that the format stores."""
        moved = self._form.stored_scales(as_array(self.scales * (1 + self.move)))
        self.scales = as_tensor(moved, self.scales.device)
        self.codes.copy_(self._rounded())

    def integers(self) -> Integers:
        """Return the integers as stored."""
        return Integers(as_array(self._rounded().detach()).astype(self._dtype), as_array(self.scales), self._form)

    def _rounded(self) -> Tensor:
        return torch.floor(self.codes + 0.5).clamp(*self._form.code_range)


def steps_and_minima(form: IntegerFormat, scales: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the scale of every entry of a matrix, and its value at code 0 with the sign changed."""
    (axis,) = form.axes
    sizes = torch.tensor(form.group_sizes(shape[axis]), device=scales.device)
    steps, *minima = scales.chunk(1 + form.has_minimum, axis)
    steps, *minima = (part.repeat_interleave(sizes, axis) for part in (steps, *minima))
    return steps, minima[0] if minima else steps * form.centre


class MovedFactor:
    """A factor, or a whole weight, that is moved in units of its root mean square: zeros stay."""

    def __init__(self, start: Array, device: torch.device) -> None:
        self._start = start
        self._values = as_tensor(start, device).requires_grad_()
        unit = float(self._values.detach().square().mean().sqrt()) if start.size else 0.0
        self.descent = Descent(self._values, unit)

    def values(self) -> Tensor:
        """Return the factor."""
        return self._values

    @torch.no_grad()
    def restart(self) -> None:
        """Return to the start."""
        self._values.copy_(as_tensor(self._start, self._values.device))
        self.descent.forget()

    def array(self) -> Array:
        """Return the factor in the dtype of the start."""
        return as_array(self._values.detach()).astype(self._start.dtype, copy=False)


class _FittedMatrix:
    """Parts of a matrix that are moved: integers with scales, or factors; and its bias."""

    def __init__(self, matrix: FactoredMatrix, device: torch.device) -> None:
        self._matrix = matrix  # all of its parts are integers, or none
        self.integers = {part: MovedIntegers(integers, device) for part, integers in matrix.integers.items()}
        floats = {part: a for part, a in matrix.arrays.items() if part != "bias" and part not in self.integers}
        self.factors = {part: MovedFactor(a, device) for part, a in floats.items()}
        bias = matrix.arrays.get("bias")
        self.bias = None if bias is None else MovedVector(as_tensor(bias, device))

    @property
    def name(self) -> str:
        """Projection or module."""
        return self._matrix.of or self._matrix.module

    @property
    def biased(self) -> frozenset[str]:
        """The projection, if its bias is a row of its factors, or 0."""
        return frozenset(self._matrix.biases)

    def parts(self) -> tuple[Tensor, ...]:
        """Return the matrices whose product is the weight."""
        integers, factors = self.integers.values(), self.factors.values()
        return (*(own.values() for own in integers), *(own.values() for own in factors))

    def result(self) -> FactoredMatrix:
        """Return the fitted matrix."""
        arrays = dict(self._matrix.arrays) | {part: factor.array() for part, factor in self.factors.items()}
        arrays |= {} if self.bias is None else {"bias": as_array(self.bias.start)}
        integers = {part: own.integers() for part, own in self.integers.items()}
        return replace(self._matrix, arrays=arrays, integers=integers)


class FittedBlock:
    """A block with weights that are fitted, and other vectors, gains of norms and biases, if `with_vectors`.

    `matrices`, of weights inside the block, name their modules; those that are not rewritten stay as they are. Codes
    and factors move in backward passes; `moved` are scales and vectors.
    """

    def __init__(self, block: Block, matrices: Sequence[FactoredMatrix], *, with_vectors: bool = False) -> None:
        self._block, self._all, device = block, matrices, block.model.device
        changed = [own for own in matrices if own.describe().is_rewritten]
        self._matrices = {(own.module, own.of): _FittedMatrix(own, device) for own in changed}
        self._vectors = dict[str, tuple[str, MovedVector]]()
        if with_vectors:
            with torch.no_grad():
                replaced = self.weights()
            self._vectors = {
                name: (stored, MovedVector(values.float()))
                for name, stored, values in _vectors_of(block)
                if name not in replaced
            }
        fitted = self._matrices.values()
        self.integers = [own for matrix in fitted for own in matrix.integers.values()]
        self.factors = [own for matrix in fitted for own in matrix.factors.values()]
        vectors = [vector for _, vector in self._vectors.values()]
        vectors += [matrix.bias for matrix in fitted if matrix.bias is not None]
        self.moved: list[MovedIntegers | MovedVector] = [*self.integers, *vectors]

    def without_originals(self) -> AbstractContextManager[None]:
        """Free the weights of the block that are replaced, inside."""
        with torch.no_grad():
            return self._block.without(self.weights())

    def run(self, x: Tensor, call: Call) -> Tensor:
        """Return the output of the block in float32; gradients flow to what is fitted where they are enabled."""
        return self._block.run(x, call, self.weights()).float()

    def weights(self) -> Weights:
        """Return the fitted weights and vectors of the block."""
        fitted = self._matrices.values()
        biased = frozenset[str]().union(*(own.biased for own in fitted))
        biases = {own.name: own.bias.values() for own in fitted if own.bias is not None}
        weights = self._block.weights(Products({own.name: own.parts() for own in fitted}, biased, biases))
        return {**weights, **{name: vector.values() for name, (_, vector) in self._vectors.items()}}

    def store_moves(self) -> None:
        """Move codes and scales, to values that their formats store, and vectors by their changes, which become 0."""
        with torch.no_grad():
            for moved in self.moved:
                moved.store_move()
                moved.move.zero_()

    def matrices(self) -> list[FactoredMatrix]:
        """Return all matrices, the fitted ones as stored."""
        return [
            self._matrices[at].result() if (at := (own.module, own.of)) in self._matrices else own for own in self._all
        ]

    def vectors(self) -> dict[str, Array]:
        """Return the vectors by stored name."""
        return {stored: as_array(vector.start) for stored, vector in self._vectors.values()}


def _vectors_of(block: Block) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the vectors of a block, biases and gains of norms: name below the block, name as stored, and values."""
    path, source = block.path, block.model.weights.source
    for name, parameter in block.layer.block.named_parameters():
        stored = source.stored.get(f"{path}.{name}")
        if parameter.ndim == 1 and isinstance(stored, str) and stored in source.checkpoint.folder.tensors:
            yield name, stored, parameter.detach()


def descend(
    blocks: Sequence[FittedBlock],
    order: Sequence[int],
    add_gradients: Callable[[int], None],
    progress: Callable[[int, int], None],
    *,
    factor_rate: float,
    move_rate: float,
    code_share: float = 1.0,
) -> None:
    """Fit blocks, one batch of `order` a step; at the end codes and scales take values that their formats store.

    `add_gradients` computes the gradients of a batch. Rates are those of factors, relative to their size, and of moves;
    that of codes, of which `code_share` is taken, follows from the number of steps. They rise over a few steps and fall
    to 0 along a cosine.
    """
    n_steps = len(order)
    code_rate = code_share * min(_CODE_RATE, _CODE_WALK / math.sqrt(max(1, n_steps)))
    rates = [(own.descent, code_rate) for block in blocks for own in block.integers]
    rates += [(own.descent, factor_rate) for block in blocks for own in block.factors]
    moves = [own.move for block in blocks for own in block.moved]  # factors alone come without any
    optimiser = torch.optim.Adam([{"params": moves}], lr=move_rate, betas=(0.9, 0.99))
    schedule = LambdaLR(optimiser, partial(_rate_factor, n_steps))
    for done, b in enumerate(order):
        progress(done, n_steps)
        for descent, rate in rates:
            descent.rate = rate * _rate_factor(n_steps, done)
        add_gradients(b)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
    progress(n_steps, n_steps)
    for block in blocks:
        block.store_moves()


def find_factor_rate(
    blocks: Sequence[FittedBlock],
    order: Sequence[int],
    add_gradients: Callable[[int], None],
    error: Callable[[], float],
) -> float:
    """Return a rate of factors for `descend`, by steps against the gradient of the first batch; 0 without factors.

    It is a sixth of the first step, of twice the length of the one before, that doubles the `error`. Of rates of whole
    models that were tried, the best is an eighth to a third of that step for the built-in Llama with a quarter to three
    quarters of its parameters, and an eighth to a quarter for SmolLM2; 0.008, good for the former, makes the latter
    diverge. Between the blocks of SmolLM2 the step differs by a factor of 64.
    """
    factors = [own for block in blocks for own in block.factors]
    if not factors:
        return 0.0
    before = error()
    for step in _TRIED_STEPS:
        for factor in factors:
            factor.descent.rate = step
        add_gradients(order[0])
        after = error()
        for factor in factors:
            factor.restart()
        for moved in (own for block in blocks for own in block.moved):
            moved.move.grad = None
        if not after < 2 * before:
            break
    return step * _FACTOR_SHARE


def _rate_factor(n_steps: int, step: int) -> float:
    return min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / max(1, n_steps)))
