"""Block-wise reconstruction: truncated layers fitted to the layers they replace, first to last.

A layer reads the stream written by the truncated layers before it, and is fitted to the output of the original layer on
the original stream: all factors of the block, by gradient descent on the squared difference at its output. No gradient
leaves the block. The factors of a layer, as truncated, descended or halfway, are chosen on held-out batches by the
stream a few layers later, so that the time grows with the number of layers and not its square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tnlib._typing import Array
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.files.process_memory import release_free_memory
from tnlib_adapters.instrument.block import Block, Weights, as_tensor
from tnlib_adapters.instrument.block_passes import OuterLayers, Streams, forward, run_block
from tnlib_adapters.instrument.running_model import RunningModel, find_matrix
from tnlib_adapters.instrument.stored_weights import Group

W = TypeVar("W")

RATE = 0.03  # learning rate, relative to the root mean square of a factor
_WARM_UP = 10
_EPSILON = 1e-8  # of Adam, for gradients with respect to moves
LATER = 6  # blocks that are run to choose them


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
        return [sum(map(partial(self._difference, end), self.held_out, out)) for out in outs]

    def _difference(self, k: int, b: int, x: Tensor) -> float:
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


class BlockFit(Protocol[W]):
    """Fit of one block with weights W: how they start, change and are used."""

    def start(self, k: int) -> W:
        """Return the truncated or rounded weights of the k-th block."""

    def candidates(
        self, block: Block, streams: FitStreams, start: W, order: Sequence[int]
    ) -> Sequence[Callable[[], W]]:
        """Return functions that make weights to choose from, one batch of `order` a step; () if nothing is fitted."""

    def weights(self, block: Block, fitted: W) -> Weights:
        """Return the weights as the block takes them."""


def fit_layers(
    model: RunningModel,
    streams: Streams,
    fit: BlockFit[W],
    *,
    tables: Mapping[str, Array] | None = None,
    n_steps: int,
    first: int = 0,
    progress: Callable[[str, int, int], None],
) -> Iterator[W]:
    """Yield the fitted weights of every layer from the `first` on, one batch of the text a step.

    Truncated or rounded `tables` of embeddings, by module, feed the first layer. Layers before `first` were fitted in
    an earlier run on the same streams. When a layer is asked for, the one before it must be saved: the streams from
    which it was fitted are deleted.
    """
    both, n, generator = FitStreams(model, streams, tables, first), len(model.layers), torch.Generator().manual_seed(0)

    def fitted(k: int, order: Sequence[int]) -> W:
        model.drop()  # the tables of the input are large
        model.load(k)
        block, best = Block(model, k), fit.start(k)
        if candidates := fit.candidates(block, both, best, order):
            errors = both.errors(block, (fit.weights(block, make()) for make in candidates))
            best = candidates[int(np.argmin(errors))]()
        both.advance(block, fit.weights(block, best))
        model.drop()
        return best

    for k in range(n):
        order = order_of_steps(both.fitted, n_steps, generator)
        if k < first:  # the random numbers of later blocks are those of a run without interruption
            continue
        progress("fitting layers", k, n)
        if k > first:
            streams.remove(f"truncated-{k - 1}")
        release_free_memory()
        yield fitted(k, order)  # without a name, which would keep the weights in memory while the next are fitted
    progress("fitting layers", n, n)


class FactorFit:
    """Fit of the factors of a block, as products of tensors; `start` returns them as arrays."""

    def __init__(self, model: RunningModel, start: Callable[[int], Products]) -> None:
        self._device, self._start = model.device, start

    def start(self, k: int) -> Products:
        """Return the truncated weights."""
        return self._start(k).each(lambda a: as_tensor(a, self._device))

    def weights(self, block: Block, fitted: Products) -> Weights:
        """Return the weights of the block."""
        return block.weights(fitted)

    def candidates(
        self, block: Block, streams: FitStreams, start: Products, order: Sequence[int]
    ) -> Sequence[Callable[[], Products]]:
        """Return the factors after descent, halfway and truncated; () if nothing of the block is."""
        if not start.parts:
            return ()
        descended = descend(block, streams, start, order)
        release_free_memory()
        halfway = partial(start.each, lambda a, b: (a + b) / 2, descended)
        return (lambda: descended), halfway, (lambda: start)


def descend(block: Block, streams: FitStreams, start: Products, order: Sequence[int]) -> Products:
    """Return the factors after one step of Adam on every batch of `order`, in units of their size."""
    factors = start.each(lambda a: a.clone().requires_grad_())
    adam(block, streams, [_in_units(a) for a in factors.parts], lambda: block.weights(factors), RATE, order)
    return factors.each(Tensor.detach)


def _in_units(factor: Tensor) -> dict[str, Any]:
    """Return the group of a factor whose steps are relative to the root mean square of its entries: zeros stay."""
    unit = float(factor.detach().square().mean().sqrt()) if factor.numel() else 0.0
    # for gradients with respect to relative steps: Adam divides gradients by their own size
    return {"params": [factor], "lr": RATE * unit, "eps": _EPSILON / unit if unit else 1.0}


def adam(
    block: Block,
    streams: FitStreams,
    moves: Sequence[Any],
    weights: Callable[[], Weights],
    rate: float,
    order: Sequence[int],
) -> None:
    """Minimise the squared difference at the output of a block by Adam over `moves`, one step for every batch.

    The rate rises over a few steps and falls to 0 along a cosine.
    """
    fused = not block.model.fits_in_memory and block.model.device.type in ("cpu", "cuda", "mps")  # which have it
    optimiser, schedule = make_optimiser(moves, rate, len(order), fused=fused)
    with block.without(weights()):
        for b in order:
            wrote = block.run(streams.truncated(block.k, b), streams.calls[b][block.k], weights())
            loss = (wrote.float() - streams.original(block.k + 1, b))[streams.batches[b].valid].square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            optimiser.zero_grad()  # the next forward pass takes their memory
            schedule.step()


def make_optimiser(
    moves: Sequence[Any], rate: float, n_steps: int, *, fused: bool
) -> tuple[torch.optim.Adam, LambdaLR]:
    """Return Adam over `moves`, if `fused` without arrays in between, and the schedule of its rate."""
    optimiser = torch.optim.Adam(moves, lr=rate, betas=(0.9, 0.99), fused=fused or None)
    return optimiser, LambdaLR(optimiser, partial(rate_factor, n_steps))


def rate_factor(n_steps: int, step: int) -> float:
    """Return the factor of a rate in a step: it rises over a few steps and falls to 0 along a cosine."""
    return min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / max(1, n_steps)))
