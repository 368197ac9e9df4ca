"""Block-wise reconstruction: truncated or rounded layers fitted to the layers they replace, first to last.

A layer reads the stream written by the changed layers before it, and is fitted to the output of the original layer on
the original stream: codes or factors, scales and biases, by gradient descent on the squared difference at its output.
No gradient leaves the block. The weights of a layer, as fitted or as they were, are chosen on held-out batches by the
stream a few layers later, so that the time grows with the number of layers and not its square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tnlib._typing import Array
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.files.process_memory import release_free_memory
from tnlib_adapters.instrument.block import Block, Weights
from tnlib_adapters.instrument.block_passes import OuterLayers, Streams, forward, run_block
from tnlib_adapters.instrument.fitted_block import FittedBlock, descend, find_factor_rate
from tnlib_adapters.instrument.running_model import RunningModel, find_matrix
from tnlib_adapters.instrument.stored_weights import Group

_MOVE_RATE = 0.003  # of relative changes of scales and biases
LATER = 6  # blocks that are run to choose between candidates


class FitStreams:
    """Streams of all batches before and after the blocks: of the original model, and of the truncated one.

    `streams` are those of the calibration batches; those of the original model that are stored are used again. Layers
    are chosen on the first few batches, and fitted on the others. The truncated streams start from the truncated
    `tables` of embeddings, by module, or are stored at the input of block `first`, the first that is fitted.
    """

    def __init__(
        self, model: RunningModel, streams: Streams, tables: Mapping[str, Array] | None = None, first: int = 0
    ) -> None:
        self.streams, self.batches = streams, streams.batches
        self.held_out, self.fitted = split_batches(len(self.batches))
        self._model = model
        self.calls = forward(OuterLayers(model), streams)
        if first:
            return
        if tables:
            model.drop()  # before the tables of the other model are read
        changed = model.changed(lambda _, values: values | tables_in(model, tables, values)) if tables else model
        truncated = OuterLayers(changed)
        with torch.no_grad():
            for b, batch in enumerate(self.batches):
                streams.write("truncated-0", b, truncated.enter(batch)[0])
        streams.finish("truncated-0")
        changed.drop()

    def original(self, k: int, b: int) -> Tensor:
        """Return the input of the k-th original block; that of one more is the output of the last."""
        return self.streams.read(f"stream-{k}", b)

    def truncated(self, k: int, b: int) -> Tensor:
        """Return the input of the k-th block after truncated blocks."""
        return self.streams.read(f"truncated-{k}", b)

    def advance(self, block: Block, weights: Weights) -> None:
        """Store the truncated streams after a block with these weights."""
        with torch.no_grad():
            for b in range(len(self.batches)):
                out = block.run(self.truncated(block.k, b), self.calls[b][block.k], weights)
                self.streams.write(f"truncated-{block.k + 1}", b, out)
        self.streams.finish(f"truncated-{block.k + 1}")

    def errors(self, block: Block, candidates: Iterable[Weights]) -> list[float]:
        """Return the squared difference from the original stream a few blocks after one with each of these weights.

        It is summed over held-out batches; the blocks in between are the original ones. One candidate is in memory at a
        time if they are made as they are taken.
        """
        k, outs = block.k, list[list[Tensor]]()  # by candidate and batch
        end = min(k + 1 + LATER, len(self._model.layers))
        with torch.no_grad():
            for weights in candidates:
                outs.append([block.run(self.truncated(k, b), self.calls[b][k], weights) for b in self.held_out])
            for later in range(k + 1, end):
                for out in outs:
                    out[:] = [
                        run_block(self._model, later, x, self.calls[b][later])
                        for b, x in zip(self.held_out, out, strict=True)
                    ]
        return [sum(map(partial(self.difference, end), self.held_out, out)) for out in outs]

    def difference(self, k: int, b: int, x: Tensor) -> float:
        """Return the squared difference of a stream before the k-th block from the original one."""
        return float((x.float() - self.original(k, b))[self.batches[b].valid].square().sum())


def split_batches(n_batches: int) -> tuple[range, range]:
    """Return the batches on which fits are chosen, a seventh and at most 6 of the first, and those for the fit."""
    count = min(6, max(1, n_batches // 7))
    return range(count), range(count if count < n_batches else 0, n_batches)


def order_of_steps(batches: Sequence[int], n_steps: int, generator: torch.Generator) -> list[int]:
    """Return the batch of every step: one random order of all batches after the other."""
    order: list[int] = []
    while len(order) < n_steps:
        order += reversed([batches[at] for at in torch.randperm(len(batches), generator=generator).tolist()])
    return order[:n_steps]


def tables_in(model: RunningModel, tables: Mapping[str, Array], values: Group) -> Group:
    """Return the tables (in, out), by module, that are among the weights of a group, by their names in the model."""
    names = {id(parameter): name for name, parameter in model.model.named_parameters()}
    modules = {names[id(find_matrix(model, module).get_parameter("weight"))]: module for module in tables}
    return {
        name: torch.from_numpy(model.wiring.matrix(module).on_rows(tables[module])).to(model.device)  # not copied
        for name, module in modules.items()
        if name in values
    }


def fit_layers(
    model: RunningModel,
    streams: Streams,
    start: Callable[[int], list[FactoredMatrix]],
    *,
    tables: Mapping[str, Array] | None = None,
    n_steps: int,
    first: int = 0,
    progress: Callable[[str, int, int], None],
) -> Iterator[list[FactoredMatrix]]:
    """Yield the fitted matrices of every layer from the `first` on, one batch of the text a step.

    `start` returns those of the k-th, truncated or rounded, with their modules. Truncated or rounded `tables` of
    embeddings, by module, feed the first layer. Layers before `first` were fitted in an earlier run on the same
    streams. When a layer is asked for, the one before it must be saved: the streams from which it was fitted are
    deleted.
    """
    both, n, generator = FitStreams(model, streams, tables, first), len(model.layers), torch.Generator().manual_seed(0)
    for k in range(n):
        order = order_of_steps(both.fitted, n_steps, generator)
        if k < first:  # the random numbers of later blocks are those of a run without interruption
            continue
        progress("fitting layers", k, n)
        if k > first:
            streams.remove(f"truncated-{k - 1}")
        release_free_memory()
        model.drop()  # the tables of the input are large
        model.load(k)
        # without a name, which would keep the matrices in memory while the next are fitted
        yield fit_layer(Block(model, k), both, start(k), order)
    progress("fitting layers", n, n)


def fit_layer(
    block: Block, streams: FitStreams, start: list[FactoredMatrix], order: Sequence[int]
) -> list[FactoredMatrix]:
    """Return the matrices of a block after a step for every batch of `order`, or as they are, whichever errs less.

    Stores the stream after the block, which is dropped.
    """
    candidates = [start]
    fitted = FittedBlock(block, start)
    if fitted.integers or fitted.factors:
        with fitted.without_originals():
            _fit(fitted, block.k, streams, order)
        candidates.append(fitted.matrices())
        del fitted
        release_free_memory()
        errors = streams.errors(block, (weights_of(block, matrices) for matrices in candidates))
        if not errors[1] < errors[0]:  # nor if it is no number
            candidates.pop()
    streams.advance(block, weights_of(block, candidates[-1]))
    block.model.drop()
    return candidates[-1]


def weights_of(block: Block, matrices: Sequence[FactoredMatrix]) -> Weights:
    """Return matrices as a block takes them."""
    with torch.no_grad():
        return FittedBlock(block, matrices).weights()


def _fit(fitted: FittedBlock, k: int, streams: FitStreams, order: Sequence[int]) -> None:
    """Minimise the squared difference at the output of the k-th block, by a step for every batch of `order`."""

    def error() -> float:
        b = streams.held_out[0]
        with torch.no_grad():
            return streams.difference(k + 1, b, fitted.run(streams.truncated(k, b), streams.calls[b][k]))

    add_gradients = partial(_add_gradients, fitted, k, streams)
    rate = find_factor_rate([fitted], order, add_gradients, error)
    descend([fitted], order, add_gradients, lambda _done, _total: None, factor_rate=rate, move_rate=_MOVE_RATE)


def _add_gradients(fitted: FittedBlock, k: int, streams: FitStreams, b: int) -> None:
    """Add the gradients of the mean squared difference at the output of a block on a batch."""
    wrote = fitted.run(streams.truncated(k, b), streams.calls[b][k])
    loss = (wrote - streams.original(k + 1, b))[streams.batches[b].valid].square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
