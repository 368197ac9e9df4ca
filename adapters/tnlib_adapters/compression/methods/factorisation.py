"""Factorisation of a checkpoint: its weights at every size, the plan of one size, and the predicted error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import starmap
from typing import Protocol

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.compression.allocate import (
    Curve,
    allocate,
    allocate_with_two_budgets,
    frontier,
    lost_by,
    smallest,
    spent_by,
)
from tnlib_adapters.compression.methods.out_of_core import Factorised as Factorised
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredMatrices, Workspace
from tnlib_adapters.compression.options import Budget
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.factors.factored_matrix import Description, FactoredMatrix
from tnlib_adapters.files.process_memory import release_free_memory

# error measures: without a text the root mean square over blocks, see `root_mean_square`; with one, of model outputs
RELATIVE = "relative error"
COSINE = "1 - cosine"
DIVERGENCE = "divergence (nats a token)"
_POINTS = 200  # of a drawn curve
Chosen = Iterable[tuple[str, list[FactoredMatrix]]]  # parts and their matrices, in any order
Fit = Callable[[Mapping[str, Sequence[int]]], Chosen]  # of options by part


class WeightOptions(Protocol):
    """A weight (in, out) with several stored forms; the result of a method of unit "matrix", with `of` left empty."""

    @property
    def curve(self) -> Curve:
        """Stored numbers or bits, and error, of every option, by ascending size."""

    def at(self, option: int) -> FactoredMatrix:
        """Return the weight in the form of an option, with `module` left empty."""


class ModuleWeights:
    """The weights of a module, each with options of its own: projections of an attention, or the only one, ""."""

    def __init__(self, weights: Mapping[str, WeightOptions], fixed: int = 0) -> None:
        self.weights, self.fixed = weights, fixed

    @property
    def curves(self) -> list[Curve]:
        """Curve of every weight."""
        return [weight.curve for weight in self.weights.values()]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the weights at one option each."""
        return [weight.at(option) for weight, option in zip(self.weights.values(), choice, strict=True)]


@dataclass(frozen=True)
class Forecast:
    """Error that a factorisation predicts, at one size and along its whole curve, without fine-tuning."""

    measure: str = RELATIVE  # error measure: `RELATIVE`, `COSINE` or `DIVERGENCE`
    error: float | None = None  # at the chosen size; None if the method cannot predict it before the fit
    # The curve: sizes, ascending, and errors. A size is a fraction of the parameters, or an average number of bits.
    sizes: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
    in_bits: bool = False  # True if sizes are bits per parameter

    def curve(self) -> dict[str, list[float]]:
        """Return "kept" or "bits", and "predicted"."""
        return {"bits" if self.in_bits else "kept": list(self.sizes), "predicted": list(self.errors)}


@dataclass(frozen=True)
class Plan:
    """Factored matrices within a budget of numbers."""

    method: str  # name of the method
    # Module path -> the factored matrices that replace its weights; modules that are not compressed are absent. Read
    # one module at a time: they may be in files.
    matrices: StoredMatrices
    n_before: int  # numbers of the compressed part in the source
    numbers: Mapping[str, int]  # module path -> stored numbers, of factors and biases
    forecast: Forecast = field(default_factory=Forecast)  # predicted error of these factors, and of other sizes
    # multiplications per token of the compressed part, before and after; None if the method does not count them
    flops: tuple[int, int] | None = None
    vectors: Mapping[str, Array] = field(default_factory=dict)  # other tensors that the fit changed, by stored name

    @property
    def descriptions(self) -> Mapping[str, Sequence[Description]]:
        """Module path -> descriptions of its factored matrices, without reading a factor."""
        return self.matrices.descriptions

    @property
    def n_after(self) -> int:
        """Numbers stored for the compressed part."""
        return sum(self.numbers.values())

    @property
    def kept(self) -> float:
        """Fraction of the parameters that is stored."""
        return self.n_after / self.n_before


@dataclass(frozen=True)
class Factorisation:
    """Factorised weights of a checkpoint, from which a plan of any size is made."""

    method: str  # name of the method
    parts: Mapping[str, LazyPart]  # attention modules and other modules by their path, all under one budget
    n_before: int  # numbers of the compressed part in the source
    measure: str = RELATIVE  # error measure: `RELATIVE`, `COSINE` or `DIVERGENCE`
    predicts_error: bool = True  # True if the errors of the blocks predict the measure
    # Function that fits the factors of the chosen sizes on calibration data, or None. It may yield those of one part
    # after another.
    fit: Fit | None = None
    # Function for what follows the choice and fit of single parts, a fit of the whole model and the choice of a gauge:
    # returns the matrices as they are stored, and other tensors that changed by name
    finish: Callable[[Chosen], tuple[Chosen, Mapping[str, Array]]] | None = None
    # factors of the errors of some parts, in the sum over blocks; 1 for the others
    weights: Mapping[str, int] = field(default_factory=dict)
    in_bits: bool = False  # True if costs are bits instead of numbers, those of all stored floats included
    workspace: Workspace = field(default_factory=Workspace)  # memory and temporary files of the plans

    def plan(self, size: float) -> Plan:
        """Return the factors for a fraction of the parameters, or an average of bits where costs are bits."""
        return self.plan_of(self.select(Budget(bits=size) if self.in_bits else Budget(keep=size)))

    def select(self, budget: Budget) -> list[int]:
        """Return an option for every block or fused layer: least error in a budget, or smallest within `max_error`.

        `ArgumentError` if no allocation meets all bounds, or sizes are too coarse to come within 1 % of `keep`.
        """
        if budget.max_error is not None:
            return self._within_error(budget.max_error, budget)
        if not self.in_bits:
            return self._within_parameters(1.0 if budget.keep is None else budget.keep, budget.flops)
        if budget.bits is None:
            return [len(curve.costs) - 1 for curve in self._curves]
        return self._within_bits(budget.bits, budget.keep)

    def _within_parameters(self, keep: float, flops: float | None) -> list[int]:
        """Return the best options within a fraction of the parameters, and of the multiplications per token."""
        budget, least = int(keep * self.n_before), math.ceil((keep - 0.01) * self.n_before)
        if (budget + 1) / self.n_before <= keep:  # the product was rounded below a whole number
            budget += 1
        fixed, curves = self._fixed, self._curves
        if flops is None:
            choice = allocate(curves, budget - fixed, max(0, least - fixed))
        else:
            most = int(flops * self._second_costs([-1] * len(curves)))
            choice = allocate_with_two_budgets(curves, budget - fixed, most)
        if choice is None:
            fewest = (fixed + sum(int(curve.costs[0]) for curve in curves)) / self.n_before
            raise ArgumentError(
                f"compress: keep must be at least {_rounded_up(fewest)} for method {self.method!r} on this model, "
                f"got {keep}; below it not even the smallest factors fit."
            )
        spent = self._spent(choice)
        if flops is None and spent < least and lost_by(curves, choice) > 0:  # fewer numbers without loss are fine
            raise ArgumentError(
                f"compress: keep={keep} cannot be met to 1 % by method {self.method!r} on this model, the nearest "
                f"below it is {_rounded_up(spent / self.n_before)}; pass that, or use another method."
            )
        return choice

    def _within_error(self, max_error: float, budget: Budget) -> list[int]:
        """Return the smallest options within an error, if they are within the other bound of the budget."""
        if self.in_bits:
            most = math.inf if budget.bits is None else math.floor(budget.bits * self.n_before)
            within, more = ("", "") if budget.bits is None else (f" within {budget.bits:g} bits", " or more bits")
        else:
            most = (1.0 if budget.keep is None else budget.keep) * self.n_before
            within, more = "", ""
            if budget.keep is not None:
                within, more = f" within {budget.keep:g} of the parameters", " or keep more"
        bound = max_error**2 * self._n_blocks if self.measure == RELATIVE else 2 * max_error  # see `_error`
        choice = smallest(self._curves, bound)
        if choice is None or self._spent(choice) > most:
            curve = frontier(self._curves)
            inside = curve.errors[curve.costs + self._fixed <= most]
            reached = f"the least is {self._error(float(inside[-1])):.3g}" if len(inside) else "none fits at all"
            raise ArgumentError(
                f"compress: max_error={max_error:g} is reached by no allocation of method {self.method!r}{within}, "
                f"{reached}; allow more error{more}."
            )
        return choice

    def _within_bits(self, bits: float, keep: float | None) -> list[int]:
        """Return the best options within an average of bits per parameter, and a fraction of the parameters."""
        budget = math.floor(bits * self.n_before) - self._fixed
        fixed = sum(part.fixed for part in self.parts.values())
        if keep is None:
            choice = allocate(self._curves, budget)
        else:
            choice = allocate_with_two_budgets(self._curves, budget, int(keep * self.n_before) - fixed)
        if choice is None:
            fewest = self._spent([0] * len(self._curves)) / self.n_before
            raise ArgumentError(
                f"compress: bits must be at least {math.ceil(fewest * 100) / 100:.2f} for method {self.method!r} on "
                f"this model, got {bits:g}; scales and biases count too."
            )
        stored = fixed + self._second_costs(choice)
        if keep is not None and stored > keep * self.n_before:
            raise ArgumentError(
                f"compress: keep must be at least {_rounded_up(stored / self.n_before)} for method {self.method!r} "
                f"within {bits:g} bits on this model, got {keep:g}; keep more, or allow more bits."
            )
        return choice

    def _second_costs(self, choice: Sequence[int]) -> int:
        """Return the sum of the second costs at these options, 0 for curves that do not state them."""
        pairs = zip(self._curves, choice, strict=True)
        return sum(0 if curve.second_costs is None else int(curve.second_costs[option]) for curve, option in pairs)

    def forecast(self, lost: float) -> Forecast:
        """Return the predicted error for a sum of losses, and the curve."""
        if not self.predicts_error:
            return Forecast(self.measure)
        curve = frontier(self._curves)
        sizes = (curve.costs + self._fixed) / self.n_before
        inside = np.flatnonzero(sizes <= (math.inf if self.in_bits else 1))
        wanted = np.linspace(sizes[0], sizes[inside[-1]], _POINTS) if len(inside) else np.zeros(0)
        chosen = np.unique(np.searchsorted(sizes, wanted))
        errors = tuple(self._error(losses) for losses in curve.errors[chosen].tolist())
        return Forecast(self.measure, self._error(lost), tuple(sizes[chosen].tolist()), errors, self.in_bits)

    def plan_of(self, choice: Sequence[int], progress: Progress = quiet, *, is_last: bool = False) -> Plan:
        """Return the factors for one option per block or fused layer, fitted if there is a fit.

        With `is_last`, each part is freed once its factors are stored or passed on: no other plan can be made.
        """
        options = dict(zip(self.parts, self.by_part(choice), strict=True))
        matrices = StoredMatrices(self.workspace)

        def keep(module: str, of_module: list[FactoredMatrix]) -> tuple[str, int]:
            matrices.add(module, [replace(matrix, module=module) for matrix in of_module])
            return module, self.parts[module].fixed + sum(matrix.n_parameters for matrix in of_module)

        chosen: Chosen = self._chosen(options, progress) if self.fit is None else self.fit(options)
        if is_last:
            chosen = self._freeing(chosen)
        vectors: Mapping[str, Array] = {}
        if self.finish is not None:
            chosen, vectors = self.finish(chosen)
        # a name for the factors would keep them in memory while the next block is fitted
        numbers = dict(starmap(keep, chosen))
        matrices.order(self.parts)
        numbers = {module: numbers[module] for module in self.parts}
        forecast = self.forecast(lost_by(self._curves, choice))
        flops = None
        if not self.in_bits and all(curve.second_costs is not None for curve in self._curves):
            flops = self._second_costs([-1] * len(choice)), self._second_costs(choice)
        return Plan(self.method, matrices, self.n_before, numbers, forecast, flops, vectors)

    def _chosen(
        self, options: Mapping[str, Sequence[int]], progress: Progress
    ) -> Iterator[tuple[str, list[FactoredMatrix]]]:
        calls = (partial(part.load().matrices, options[module]) for module, part in self.parts.items())
        results, stage = self.workspace.workers.map(calls), "rounding weights" if self.in_bits else "choosing factors"
        for done, module in enumerate(self.parts):
            progress(stage, done, len(options))
            yield module, next(results)  # without a name, which would keep it in memory while the next is made
        progress(stage, len(options), len(options))

    def _freeing(self, chosen: Chosen) -> Iterator[tuple[str, list[FactoredMatrix]]]:
        """Yield the factors of all parts; a part is freed before the next one is asked for."""
        for module, matrices in chosen:
            yield module, matrices
            del matrices  # the name would keep them in memory while the next are made
            self.parts[module].free()
            release_free_memory()

    def by_part(self, choice: Sequence[int]) -> list[Sequence[int]]:
        """Return the options of the blocks of every part."""
        options = dict(zip(self._by_layer, choice, strict=True))
        return [
            [options[curve.fused or (name, k)] for k, curve in enumerate(part.curves)]
            for name, part in self.parts.items()
        ]

    @property
    def _fixed(self) -> int:
        return 0 if self.in_bits else sum(part.fixed for part in self.parts.values())

    @cached_property
    def _by_layer(self) -> dict[str | tuple[str, int], Curve]:
        """Curves of all blocks, and sums of those of fused layers."""
        curves = dict[str | tuple[str, int], Curve]()
        for name, part in self.parts.items():
            weight = self.weights.get(name, 1)
            for k, curve in enumerate(part.curves):
                key, weighted = curve.fused or (name, k), replace(curve, errors=weight * curve.errors)
                curves[key] = curves[key] + weighted if key in curves else weighted
        return curves

    @property
    def _curves(self) -> list[Curve]:
        return [*self._by_layer.values()]

    @property
    def _n_blocks(self) -> int:
        return sum(self.weights.get(name, 1) * len(part.curves) for name, part in self.parts.items())

    def _spent(self, choice: Sequence[int]) -> int:
        return self._fixed + spent_by(self._curves, choice)

    def _error(self, lost: float) -> float:
        """Return the error of a sum of losses: squared relative errors of blocks, or twice the error of the outputs."""
        return math.sqrt(lost / self._n_blocks) if self.measure == RELATIVE else lost / 2


def _rounded_up(fraction: float) -> str:
    """Return a fraction in four digits, rounded up so that it suffices as `keep`."""
    return f"{math.ceil(fraction * 1e4) / 1e4:.4f}"
