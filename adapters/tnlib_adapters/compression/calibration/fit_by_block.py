"""Fit of a model block by block: its steps, its blocks, and the blocks that an interrupted run has saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.compression.calibration.resumed_run import Fitted, FittedFiles
from tnlib_adapters.compression.methods.out_of_core import LazyPart
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


@dataclass(frozen=True)
class ChosenWeights:
    """The weights of a model at their chosen options, by block."""

    wiring: Wiring
    parts: Mapping[str, LazyPart]  # weights by module
    options: Mapping[str, Sequence[int]]  # chosen, by module

    def of_block(self, k: int) -> Iterator[tuple[str, Any, int]]:
        """Yield projection or module, weight and option of every weight of a block, the attention first."""
        yield from chain.from_iterable(map(self._of_module, self._modules[k]))

    def outside(self) -> Iterator[tuple[str, Any, int]]:
        """Yield module, weight and option of every weight outside the blocks."""
        known = [name for modules in self._modules for name in modules]
        yield from chain.from_iterable(self._of_module(name) for name in self.parts if name not in known)

    def packed(self, k: int, pack: Callable[[str, Any], FactoredMatrix]) -> Fitted:
        """Return the weights of a block by module; `pack` returns the matrix of a projection or module."""
        return [(name, [pack(key, weight) for key, weight, _ in self._of_module(name)]) for name in self._modules[k]]

    def _of_module(self, name: str) -> Iterator[tuple[str, Any, int]]:
        weights = self.parts[name].load().weights
        for (of, weight), option in zip(weights.items(), self.options[name], strict=True):
            yield of or name, weight, option

    @property
    def _modules(self) -> list[list[str]]:
        """Modules of every block."""
        blocks = zip(self.wiring.attention_modules, self.wiring.layers, strict=True)
        matrices = [(module, (*layer.latent_matrices, *layer.feed_forward_matrices)) for module, layer in blocks]
        names = [[module, *(linear.name for linear in linears)] for module, linears in matrices]
        return [[name for name in of_block if name in self.parts] for of_block in names]


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
