"""Weights of a language model fitted to its predictions: codes or factors, scales, and the vectors of the blocks.

A fit of one block sees the error at its own output alone. Here gradient descent minimises the Kullback-Leibler
divergence of the predictions from those of the original, 256 tokens a step, over the weights of all blocks at once.
Encoders are fitted block by block: as a whole, from the rounded weights, the attention of MiniLM in 2 bits has 1 -
cosine 0.0203, by its blocks 0.0177.

A batch passes the blocks forward without a graph, which stores their inputs, and backward block by block, each run
once more: the graph of one block is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tnlib._typing import Array
from tnlib_adapters.factors.expansion import weight_of_parts
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, by_module
from tnlib_adapters.factors.model_weights import OUTSIDE
from tnlib_adapters.instrument.block import Block
from tnlib_adapters.instrument.block_passes import OuterLayers, Streams, forward
from tnlib_adapters.instrument.fitted_block import FittedBlock, descend, find_factor_rate
from tnlib_adapters.instrument.layer_fit import order_of_steps, split_batches, tables_in
from tnlib_adapters.instrument.running_model import Batch, RunningModel
from tnlib_adapters.instrument.stored_weights import Group

# Of relative changes of scales and vectors, and its largest ratio to the rate of factors beside them: at 0.01 vectors
# of SmolLM2, whose factors have 0.0003, raise the error, 0.498 nats a token for 0.483
_RATE, _MOVE_SHARE = 0.01, 4.0
_ATTEMPTS = (1.0, 0.25)  # shares of the rates: the second is tried if the error does not fall with the first
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
    """Return matrices with fitted integers, factors and biases, and by stored name the fitted vectors of the blocks.

    Factors are moved in the gauge in which they come. The fit reads as many tokens as `n_batches` batches have, each in
    several steps. Vectors are fitted `with_vectors` only. The first tokens are held out. If the error on them does not
    fall, the fit is repeated at a quarter of the rates; if it does not fall then, the matrices are returned as they
    are, without vectors.
    """
    split = streams.split(_STEP_TOKENS)
    held_out, fitted = split_batches(len(split.batches))
    n_steps = n_batches * len(split.batches) // len(streams.batches)
    order = order_of_steps(fitted, n_steps, torch.Generator().manual_seed(0))
    factor_rate: float | None = None
    for share in _ATTEMPTS:
        fit = _OutputFit(model, split, matrices, with_vectors=with_vectors)
        with fit.without_originals():
            before = fit.error(held_out)
            if factor_rate is None:
                factor_rate = fit.find_factor_rate(order, held_out)
            fit.descend(order, share, factor_rate, progress)
            if fit.error(held_out) < before:
                return fit.result()
        del fit  # before the next one is made
    return matrices, {}


class _OutputFit:
    """A model with rounded or truncated weights, and its error."""

    def __init__(self, model: RunningModel, streams: Streams, matrices: Matrices, *, with_vectors: bool) -> None:
        self._streams, self._original, self._matrices = streams, OuterLayers(model), matrices
        self._calls = forward(self._original, streams, inputs=())
        in_blocks = [[name for name in names if name in matrices] for names in model.wiring.modules_by_block]
        outside = matrices.keys() - {name for names in in_blocks for name in names}
        tables = dict[str, Array]()
        for name in outside:
            for matrix in matrices[name]:
                if matrix.describe().is_rewritten:
                    parts = matrix.with_integers(matrix.integers).arrays.values()
                    tables[name] = weight_of_parts([np.asarray(part, np.float32) for part in parts])

        def change(k: int, group: Group) -> Group:
            """Put the tables in; of the blocks only the first runs, once, before its input is known."""
            return group | tables_in(model, tables, group) if k in (OUTSIDE, 0) else {}

        self._changed = OuterLayers(model.changed(change))
        self._blocks = [
            FittedBlock(Block(model, k), [own for name in names for own in matrices[name]], with_vectors=with_vectors)
            for k, names in enumerate(in_blocks)
        ]
        self.has_factors = any(block.factors for block in self._blocks)

    @contextmanager
    def without_originals(self) -> Iterator[None]:
        """Free the original weights that are replaced."""
        with ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(block.without_originals())
            yield

    def find_factor_rate(self, order: Sequence[int], held_out: Sequence[int]) -> float:
        """Return the rate of factors by the error on batches that are held out."""
        return find_factor_rate(self._blocks, order, self.add_gradients, partial(self.error, held_out))

    def descend(
        self, order: Sequence[int], share: float, factor_rate: float, progress: Callable[[int, int], None]
    ) -> None:
        """Fit to the predictions, one batch of `order` a step, at a share of the rates."""
        move_rate = min(_RATE, _MOVE_SHARE * factor_rate) if self.has_factors else _RATE
        descend(
            self._blocks,
            order,
            self.add_gradients,
            progress,
            factor_rate=share * factor_rate,
            move_rate=share * move_rate,
            code_share=share,
        )

    def result(self) -> tuple[Matrices, dict[str, Array]]:
        """Return the matrices as stored, and the vectors by stored name."""
        changed, vectors = dict(self._matrices), dict[str, Array]()
        for block in self._blocks:
            changed |= by_module(block.matrices())
            vectors |= block.vectors()
        return changed, vectors

    def error(self, batches: Sequence[int]) -> float:
        """Return the divergence of the predictions, summed over the tokens of batches."""
        error = 0.0
        with torch.no_grad():
            for b in batches:
                for part, x, original in self._parts(b, self._forward(b)[-1]):
                    before = self._original.leave(original, part)[part.valid].log_softmax(-1)
                    after = self._changed.leave(x, part)[part.valid].log_softmax(-1)
                    difference = after.neg_().add_(before)  # in place: as large as all logits of a part
                    error += float(difference.mul_(before.exp()).sum())
        return error

    def add_gradients(self, b: int) -> None:
        """Add the gradients of the error on a batch, per token, to those of moves; codes and factors take a step."""
        inputs = self._forward(b)
        gradient = self._gradient_at_output(b, inputs.pop())
        for k in reversed(range(len(self._blocks))):
            x = inputs.pop().requires_grad_()
            self._blocks[k].run(x, self._calls[b][k]).backward(gradient)  # type: ignore[no-untyped-call]
            gradient = cast(Tensor, x.grad)

    def _forward(self, b: int) -> list[Tensor]:
        """Return the inputs of all blocks for a batch, and the output of the last."""
        with torch.no_grad():
            streams = [self._changed.enter(self._streams.batches[b])[0]]
            for k, block in enumerate(self._blocks):
                streams.append(block.run(streams[-1], self._calls[b][k]))
        return streams

    def _gradient_at_output(self, b: int, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for part, after, original in self._parts(b, x):
            with torch.no_grad():
                target = self._original.leave(original, part)[part.valid].softmax(-1)
            loss = cross_entropy(self._changed.leave(after, part)[part.valid], target, reduction="sum")
            (loss / self._streams.batches[b].n_tokens).backward()  # type: ignore[no-untyped-call]
        return cast(Tensor, x.grad)

    def _parts(self, b: int, x: Tensor) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield parts of a batch, as logits are large, their streams, and those of the original."""
        batch, original = self._streams.batches[b], self._streams.read(f"stream-{len(self._blocks)}", b)
        for at in batch.parts(_TOKENS):
            yield batch.part(at), x[at], original[at]
