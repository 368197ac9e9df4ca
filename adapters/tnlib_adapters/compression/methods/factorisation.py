"""One factorisation of a checkpoint, and the factors of every size that it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib_adapters.compression.allocate import Curve, allocate, frontier, lost_by, smallest, spent_by
from tnlib_adapters.compression.evaluation.error_measures import RELATIVE, Forecast
from tnlib_adapters.compression.methods.table import Factorised
from tnlib_adapters.compression.plan import Plan
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.factors.attention_factors import Piece

_POINTS = 200  # of a curve that is drawn

Fit = Callable[[Sequence[Sequence[int]]], list[list[Piece]]]  # options of every layer, every module -> their pieces


@dataclass(frozen=True)
class Factorisation:
    """All layers of a checkpoint, factorised; any fraction can be planned from it.

    Parameters
    ----------
    method
        What it was factorised by.
    layers
        The attention of every layer.
    n_before
        Numbers of all that is compressed, as it came.
    measure
        What an error is.
    foretells
        Whether the errors of its blocks say what the measure will be.
    modules
        Matrices outside the attention, in the same budget.
    fit
        What mends the factors once their sizes are chosen; None: nothing does.
    """

    method: str
    layers: Sequence[Factorised]
    n_before: int
    measure: str = RELATIVE
    foretells: bool = True
    modules: Sequence[Factorised] = ()
    fit: Fit | None = None

    def plan(self, keep: float, progress: Progress = quiet) -> Plan:
        """Choose the sizes for a fraction `keep` of the numbers and return the factors; raises as `choose` does."""
        return self.at(self.choose(keep), progress)

    def choose(self, keep: float) -> list[int]:
        """Return an option for every block of every layer that makes the most of a fraction `keep` of the numbers.

        Raises
        ------
        ArgumentError
            If not even the smallest factors fit, or sizes are too coarse to come within 1 % of the fraction.
        """
        budget, least = int(keep * self.n_before), math.ceil((keep - 0.01) * self.n_before)
        if (budget + 1) / self.n_before <= keep:  # the product was rounded below a whole number
            budget += 1
        fixed, curves = self._fixed, self._curves
        choice = allocate(curves, budget - fixed, max(0, least - fixed))
        if choice is None:
            fewest = (fixed + sum(int(curve.costs[0]) for curve in curves)) / self.n_before
            raise ArgumentError(
                f"compress: keep must be at least {_rounded_up(fewest)} for method {self.method!r} on this model, "
                f"got {keep}; below it not even the smallest factors fit."
            )
        spent = self._spent(choice)
        if spent < least and lost_by(curves, choice) > 0:  # with nothing lost, fewer numbers are no fault
            raise ArgumentError(
                f"compress: keep={keep} cannot be met to 1 % by method {self.method!r} on this model, the nearest "
                f"below it is {_rounded_up(spent / self.n_before)}; ask for that, or use another method."
            )
        return choice

    def select(self, keep: float | None, max_error: float | None) -> list[int]:
        """Return an option for every block: the best within `keep`, or the smallest within `max_error` (and `keep`).

        Only what `foretells` can be within an error.

        Raises
        ------
        ArgumentError
            If no allocation meets what is asked for.
        """
        limit = 1.0 if keep is None else keep
        if max_error is None:
            return self.choose(limit)
        choice = smallest(self._curves, self._lost_within(max_error))
        if choice is None or self._spent(choice) > limit * self.n_before:
            curve = frontier(self._curves)
            within = curve.errors[curve.costs + self._fixed <= limit * self.n_before]
            reached = f"the least is {self._error(float(within[-1])):.3g}" if len(within) else "none fits at all"
            raise ArgumentError(
                f"compress: max_error={max_error:g} is reached by no allocation within {limit:g} of the numbers, "
                f"{reached}; allow more error{' or keep more' if limit < 1 else ''}."
            )
        return choice

    def forecast(self, lost: float) -> Forecast:
        """Return the error that a sum of losses stands for, and the curve."""
        if not self.foretells:
            return Forecast(self.measure)
        curve = frontier(self._curves)
        kept = (curve.costs + self._fixed) / self.n_before
        inside = np.flatnonzero(kept <= 1)
        wanted = np.linspace(kept[0], kept[inside[-1]], _POINTS) if len(inside) else np.zeros(0)
        chosen = np.unique(np.searchsorted(kept, wanted))
        errors = tuple(self._error(one) for one in curve.errors[chosen].tolist())
        return Forecast(self.measure, self._error(lost), tuple(kept[chosen].tolist()), errors)

    def at(self, choice: Sequence[int], progress: Progress = quiet) -> Plan:
        """Return the factors at one option of every block, fitted where there is a fit."""
        options, pieces = self.by_part(choice), list[list[Piece]]()
        if self.fit is None:
            for done, (one, own) in enumerate(zip(self._parts, options, strict=True)):
                progress("choosing factors", done, len(options))
                pieces.append(one.pieces(own))
            progress("choosing factors", len(options), len(options))
        else:
            pieces = self.fit(options)
        layers, modules = pieces[: len(self.layers)], pieces[len(self.layers) :]
        return Plan(
            method=self.method,
            layers=layers,
            n_before=self.n_before,
            layer_numbers=_numbers(self.layers, layers),
            forecast=self.forecast(lost_by(self._curves, choice)),
            modules=[piece for pieces in modules for piece in pieces],
            module_numbers=sum(_numbers(self.modules, modules)),
        )

    def by_part(self, choice: Sequence[int]) -> list[Sequence[int]]:
        """Return the options of every layer, then of every module, of one of all blocks."""
        ends = np.cumsum([len(one.curves) for one in self._parts]).tolist()
        return [choice[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    @property
    def _parts(self) -> tuple[Factorised, ...]:
        return (*self.layers, *self.modules)

    @property
    def _fixed(self) -> int:
        return sum(one.fixed for one in self._parts)

    @property
    def _curves(self) -> list[Curve]:
        return [curve for one in self._parts for curve in one.curves]

    def _spent(self, choice: Sequence[int]) -> int:
        return self._fixed + spent_by(self._curves, choice)

    def _error(self, lost: float) -> float:
        """Blocks lose their squared relative error; gates the mean square of a change, of which an error is half."""
        return math.sqrt(lost / len(self._curves)) if self.measure == RELATIVE else lost / 2

    def _lost_within(self, error: float) -> float:
        return error**2 * len(self._curves) if self.measure == RELATIVE else 2 * error


def _numbers(parts: Sequence[Factorised], pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """Return what every part stores, biases that stay as they are included."""
    return [one.fixed + sum(piece.n_parameters for piece in own) for one, own in zip(parts, pieces, strict=True)]


def _rounded_up(fraction: float) -> str:
    """Return a fraction in four digits, never less than it is: what is asked for must suffice."""
    return f"{math.ceil(fraction * 1e4) / 1e4:.4f}"
