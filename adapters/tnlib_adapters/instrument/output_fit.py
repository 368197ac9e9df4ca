"""Rounded weights of a language model fitted to its predictions: codes, scales, and the vectors of the blocks.

A fit of one block sees the error at its own output alone. Here gradient descent minimises the Kullback-Leibler
divergence of the predictions from those of the original, 256 tokens a step, over the weights of all blocks at once.
Adam moves scales relative to themselves, biases and gains of norms, as Chen et al. (EfficientQAT, ACL 2025) do in their
second phase. Codes are moved as floats that the forward pass rounds, with a derivative of 1, from the middle of their
cells. With 2 bits 2 % of those of the built-in Llama change, and 0.2 % of those of SmolLM2: those whose gradients are
large for their row and column, and keep their sign. Embeddings of MiniLM gained nothing beyond the fit of its blocks
(attention in 2 bits: 1 - cosine 0.0190 instead of 0.0191).

A batch passes the blocks forward without a graph, which stores their inputs, and backward block by block, each run
once more: the graph of one block is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tnlib._typing import Array
from tnlib_adapters.factors.expansion import weight_of_parts
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.integers import Integers
from tnlib_adapters.factors.model_weights import OUTSIDE
from tnlib_adapters.factors.projections import Projections
from tnlib_adapters.instrument.block import Block, as_array, as_tensor
from tnlib_adapters.instrument.block_passes import Call, OuterLayers, Streams, forward
from tnlib_adapters.instrument.layer_fit import make_optimiser, order_of_steps, rate_factor, split_batches, tables_in
from tnlib_adapters.instrument.rounded_fit import MovedVector, steps_and_minima
from tnlib_adapters.instrument.running_model import Batch, RunningModel
from tnlib_adapters.instrument.stored_weights import Group

_RATE = 0.01  # of relative changes
_CODE_RATE = 0.04  # most of codes, in their unit, for gradients of size 1: with 0.05 SmolLM2 in 2 bits diverges
_CODE_WALK = 0.32  # rate times the root of the number of steps: how far codes would walk along random gradients
_ATTEMPTS = (1.0, 0.25)  # factors of the rates: the second is tried if the error does not fall with the first
_LARGEST = 3.0  # gradient of a code, relative to the root mean square
_MEMORY = 0.99  # of mean squares, for each step
_SMALLEST = 1e-30
# Of a step, or one text. Scales alone of the built-in Llama in 2 bits: 0.2297 nats a token with 1024, 0.2093 with 256
_STEP_TOKENS = 256
_TOKENS = 128  # whose logits are in memory at once

Matrices = Mapping[str, Sequence[FactoredMatrix]]  # by module


def fit_to_output(
    model: RunningModel,
    streams: Streams,
    matrices: Matrices,
    n_batches: int,
    progress: Callable[[int, int], None],
    *,
    with_vectors: bool,
) -> tuple[Matrices, dict[str, Array]]:
    """Return rounded matrices with fitted integers and biases, and by stored name the fitted vectors of the blocks.

    The fit reads as many tokens as `n_batches` batches have, each in several steps. Vectors are fitted `with_vectors`
    only. The first tokens are held out. If the error on them does not fall, the fit is repeated at a quarter of the
    rates; if it does not fall then, the matrices are returned as they are, without vectors.
    """
    split = streams.split(_STEP_TOKENS)
    held_out, fitted = split_batches(len(split.batches))
    n_steps = n_batches * len(split.batches) // len(streams.batches)
    order = order_of_steps(fitted, n_steps, torch.Generator().manual_seed(0))
    for factor in _ATTEMPTS:
        fit = _OutputFit(model, split, matrices, with_vectors=with_vectors)
        with fit.without_originals():
            before = fit.error(held_out)
            fit.descend(order, factor, progress)
            if fit.error(held_out) < before:
                return fit.result()
        del fit  # before the next one is made
    return matrices, {}


class _OutputFit:
    """A model with rounded weights: their codes, and relative changes of their scales and of the vectors of blocks."""

    def __init__(self, model: RunningModel, streams: Streams, matrices: Matrices, *, with_vectors: bool) -> None:
        self._streams, self._original, self._matrices = streams, OuterLayers(model), matrices
        self._calls = forward(self._original, streams, inputs=())
        in_blocks = [[name for name in names if name in matrices] for names in model.wiring.modules_by_block]
        outside = matrices.keys() - {name for names in in_blocks for name in names}
        tables = dict[str, Array]()
        for name in outside:
            (matrix,) = matrices[name]
            tables[name] = weight_of_parts([integers.values() for integers in matrix.integers.values()])

        def change(k: int, group: Group) -> Group:
            """Put the tables in; of the blocks only the first runs, once, before its input is known."""
            return group | tables_in(model, tables, group) if k in (OUTSIDE, 0) else {}

        self._rounded = OuterLayers(model.changed(change))
        self._blocks = [
            _FittedBlock(Block(model, k), [m for name in names for m in matrices[name]], with_vectors=with_vectors)
            for k, names in enumerate(in_blocks)
        ]
        self.fitted = [moved for block in self._blocks for moved in block.fitted]
        self.codes = [moved for moved in self.fitted if isinstance(moved, _MovedIntegers)]

    @contextmanager
    def without_originals(self) -> Iterator[None]:
        """Free the original weights that are replaced by rounded ones."""
        with ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(block.without_originals())
            yield

    def descend(self, order: Sequence[int], factor: float, progress: Callable[[int, int], None]) -> None:
        """Move codes, scales and vectors, one batch of `order` a step, at rates times `factor`.

        At the end they take values that their formats store.
        """
        optimiser, schedule = make_optimiser([own.move for own in self.fitted], factor * _RATE, len(order), fused=False)
        rate = factor * min(_CODE_RATE, _CODE_WALK / max(1, len(order)) ** 0.5)
        of_codes = [_CodeDescent(moved) for moved in self.codes]
        for done, b in enumerate(order):
            progress(done, len(order))
            for descent in of_codes:
                descent.rate = rate * rate_factor(len(order), done)
            self.add_gradients(b)
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
        progress(len(order), len(order))
        self.store_moves()

    def store_moves(self) -> None:
        """Move codes and scales, to values that their formats store, and vectors by their changes, which become 0."""
        with torch.no_grad():
            for moved in self.fitted:
                moved.store_move()
                moved.move.zero_()

    def result(self) -> tuple[Matrices, dict[str, Array]]:
        """Return the matrices with codes and scales as stored, and the vectors by stored name."""
        changed = dict(self._matrices)
        vectors: dict[str, Array] = {}
        for block in self._blocks:
            for module, matrix in block.matrices():
                changed[module] = [matrix if own.of == matrix.of else own for own in changed[module]]
            vectors |= block.vectors()
        return changed, vectors

    def error(self, batches: Sequence[int]) -> float:
        """Return the divergence of the predictions, summed over the tokens of batches."""
        error = 0.0
        with torch.no_grad():
            for b in batches:
                for part, x, original in self._parts(b, self._forward(b)[-1]):
                    before = self._original.leave(original, part)[part.valid].log_softmax(-1)
                    after = self._rounded.leave(x, part)[part.valid].log_softmax(-1)
                    difference = after.neg_().add_(before)  # in place: as large as all logits of a part
                    error += float(difference.mul_(before.exp()).sum())
        return error

    def add_gradients(self, b: int) -> None:
        """Add the gradients of the error on a batch, per token, to those of the moves."""
        inputs = self._forward(b)
        gradient = self._gradient_at_output(b, inputs.pop())
        for k in reversed(range(len(self._blocks))):
            x = inputs.pop().requires_grad_()
            self._blocks[k].run(x, self._calls[b][k]).backward(gradient)  # type: ignore[no-untyped-call]
            gradient = cast(Tensor, x.grad)

    def _forward(self, b: int) -> list[Tensor]:
        """Return the inputs of all blocks for a batch, and the output of the last."""
        with torch.no_grad():
            streams = [self._rounded.enter(self._streams.batches[b])[0]]
            for k, block in enumerate(self._blocks):
                streams.append(block.run(streams[-1], self._calls[b][k]))
        return streams

    def _gradient_at_output(self, b: int, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for part, after, original in self._parts(b, x):
            with torch.no_grad():
                target = self._original.leave(original, part)[part.valid].softmax(-1)
            loss = cross_entropy(self._rounded.leave(after, part)[part.valid], target, reduction="sum")
            (loss / self._streams.batches[b].n_tokens).backward()  # type: ignore[no-untyped-call]
        return cast(Tensor, x.grad)

    def _parts(self, b: int, x: Tensor) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield parts of a batch, as logits are large, their streams, and those of the original."""
        batch, original = self._streams.batches[b], self._streams.read(f"stream-{len(self._blocks)}", b)
        for at in batch.parts(_TOKENS):
            yield batch.part(at), x[at], original[at]


class _FittedBlock:
    """Rounded weights of one block: their codes, and relative changes of their scales, of biases and other vectors."""

    def __init__(self, block: Block, matrices: Sequence[FactoredMatrix], *, with_vectors: bool) -> None:
        self._block, self._matrices, device = block, matrices, block.model.device
        self._grids = [
            {part: _MovedIntegers(integers, device) for part, integers in matrix.integers.items()}
            for matrix in matrices
        ]
        self._biases = [
            MovedVector(as_tensor(matrix.arrays["bias"], device)) if "bias" in matrix.arrays else None
            for matrix in matrices
        ]
        self._vectors = dict[str, tuple[str, MovedVector]]()
        if with_vectors:
            with torch.no_grad():
                replaced = self._weights()
            self._vectors = {
                name: (stored, MovedVector(values.float()))
                for name, stored, values in _vectors_of(block)
                if name not in replaced
            }

    @property
    def fitted(self) -> list[_MovedIntegers | MovedVector]:
        """Integers, biases and other vectors, each with its change."""
        grids = [grid for grids in self._grids for grid in grids.values()]
        biases = [bias for bias in self._biases if bias is not None]
        return [*grids, *biases, *(vector for _, vector in self._vectors.values())]

    def without_originals(self) -> AbstractContextManager[None]:
        """Free the weights of the block that are replaced, inside."""
        with torch.no_grad():
            return self._block.without(self._weights())

    def run(self, x: Tensor, call: Call) -> Tensor:
        """Return the output of the block in float32; gradients flow to the moves where they are enabled."""
        return self._block.run(x, call, self._weights()).float()

    def matrices(self) -> Iterator[tuple[str, FactoredMatrix]]:
        """Yield modules and matrices."""
        for matrix, grids, bias in zip(self._matrices, self._grids, self._biases, strict=True):
            arrays = dict(matrix.arrays) | ({} if bias is None else {"bias": as_array(bias.start)})
            integers = {part: grid.integers() for part, grid in grids.items()}
            yield matrix.module, replace(matrix, arrays=arrays, integers=integers)

    def vectors(self) -> dict[str, Array]:
        """Return the vectors by stored name."""
        return {stored: as_array(vector.start) for stored, vector in self._vectors.values()}

    def _weights(self) -> dict[str, Tensor]:
        values, biases = dict[str, Any](), dict[str, Any]()
        for matrix, grids, bias in zip(self._matrices, self._grids, self._biases, strict=True):
            values[matrix.of or matrix.module] = weight_of_parts([grid.values() for grid in grids.values()])
            if bias is not None:
                biases[matrix.of or matrix.module] = bias.values()
        weights = self._block.of_weights(Projections(values, biases))
        return weights | {name: vector.values() for name, (_, vector) in self._vectors.items()}


class _MovedIntegers:
    """Codes of a matrix, as floats that are rounded, their scales, and relative changes of these."""

    def __init__(self, integers: Integers, device: torch.device) -> None:
        self._form, self._dtype = integers.format, integers.codes.dtype
        self.codes = as_tensor(integers.codes, device).requires_grad_()
        self.scales = as_tensor(integers.scales, device)
        self.move = torch.zeros_like(self.scales, requires_grad=True)

    def values(self) -> Tensor:
        """Return the values of the rounded codes."""
        steps, minima = steps_and_minima(self._form, self.scales * (1 + self.move), self.codes.shape)
        rounded = self.codes + (self._rounded() - self.codes).detach()
        return steps * rounded - minima

    @property
    def edges(self) -> tuple[float, float]:
        """Bounds of the cells of the smallest and of the largest code."""
        low, high = self._form.code_range
        return low - 0.5, high + 0.5

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


class _CodeDescent:
    """Descent of the codes of a matrix by gradients relative to their root mean square, a step in every backward pass.

    Mean squares are products of one number for a row and one for a column (Shazeer and Stern, Adafactor, 2018): those
    of Adam, and its momentum, would take twice the memory of the codes, and gain nothing on the built-in Llama in 2
    bits. Adafactor of torch moves by the size of the codes themselves, which grows with the bits. A gradient is freed
    before those of other blocks are computed. Codes are clamped to the edges of their range: one far beyond would take
    many steps to come back.
    """

    rate = 0.0  # of the next step

    def __init__(self, moved: _MovedIntegers) -> None:
        codes, self._edges, self._n_steps = moved.codes, moved.edges, 0
        self._rows, self._columns = (torch.zeros(n, device=codes.device) for n in codes.shape)
        codes.register_post_accumulate_grad_hook(self.step)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, codes: Tensor) -> None:
        """Move the codes against their gradient, and free it."""
        gradient, codes.grad = cast(Tensor, codes.grad), None
        self._n_steps += 1
        squares = gradient.square()
        self._rows.lerp_(squares.mean(1), 1 - _MEMORY)
        self._columns.lerp_(squares.mean(0), 1 - _MEMORY)
        mean = self._rows.mean().clamp(min=_SMALLEST)
        squares = torch.outer(self._rows / mean, self._columns / (1 - _MEMORY**self._n_steps))
        scale = squares.sqrt_().clamp_(min=_SMALLEST)
        # with a few outliers at once the fit would diverge
        codes.sub_(gradient.div_(scale).clamp_(-_LARGEST, _LARGEST), alpha=self.rate).clamp_(*self._edges)


def _vectors_of(block: Block) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the vectors of a block, biases and gains of norms: name below the block, name as stored, and values."""
    path, source = block.path, block.model.weights.source
    for name, parameter in block.layer.block.named_parameters():
        stored = source.stored.get(f"{path}.{name}")
        if parameter.ndim == 1 and isinstance(stored, str) and stored in source.checkpoint.folder.tensors:
            yield name, stored, parameter.detach()
