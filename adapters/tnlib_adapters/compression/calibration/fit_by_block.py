"""Fit of a model block by block: its steps, its blocks, and the blocks that an interrupted run has saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from typing import TYPE_CHECKING

from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.compression.calibration.resumed_run import Fitted, FittedFiles
from tnlib_adapters.factors.factored_matrix import FactoredMatrix

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import RunningModel


STEPS, ROUNDED_STEPS = 400, 200  # most optimizer steps of a layer, of factors and of rounded weights
PASSES = {"low": 0, "default": 2, "high": 1000}  # of rounded weights over the text in a layer, by effort
_FACTOR_PASSES = 2  # of factors, for each pass of rounded weights: they start further from the original


def fit_steps(n_batches: int, effort: str, *, in_bits: bool, fit_in_memory: bool) -> int:
    """Return the optimizer steps of a layer: of a model that does not fit in memory at most one pass over the text."""
    passes = PASSES[effort] * (1 if in_bits else _FACTOR_PASSES)
    return min(ROUNDED_STEPS if in_bits else STEPS, (passes if fit_in_memory else min(passes, 1)) * n_batches)


def steps_of_model(model: RunningModel, streams: Streams, effort: str, *, in_bits: bool = False) -> int:
    """Return `fit_steps` of a running model."""
    return fit_steps(len(streams.batches), effort, in_bits=in_bits, fit_in_memory=model.fits_in_memory)


def saved(files: FittedFiles, fit: Callable[[int], Iterator[Fitted]]) -> Iterator[tuple[str, list[FactoredMatrix]]]:
    """Yield the fitted weights of all blocks: those that are saved, then those of `fit` from the next block on."""
    n_done = files.resume()
    for k in range(n_done):
        yield from files.read(k)

    def save(k: int, fitted: Fitted) -> Fitted:
        files.save(k, fitted)
        return fitted

    # a name for the weights of a block would keep them in memory while the next one is fitted
    yield from chain.from_iterable(map(save, count(n_done), fit(n_done)))


def by_block(wiring: Wiring, parts: Iterable[str]) -> tuple[list[list[str]], list[str]]:
    """Return the parts in every block, its attention first, and those outside the blocks."""
    known = list(parts)
    of_blocks = [
        [module, *(matrix.name for matrix in (*layer.latent_matrices, *layer.feed_forward_matrices))]
        for module, layer in zip(wiring.attention_modules, wiring.layers, strict=True)
    ]
    inside = [[name for name in own if name in known] for own in of_blocks]
    return inside, [name for name in known if not any(name in own for own in inside)]
