"""From a checkpoint and a fraction to keep, to the factors of every layer."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.checkpoints.rope import read_frequencies
from tnlib_adapters.compression.allocate import Curve, allocate, frontier, smallest
from tnlib_adapters.compression.methods import METHODS, REFUSE, TURNED, UNPREDICTED, Factorised
from tnlib_adapters.compression.names import BY_TEXT

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress."""


RELATIVE = "relative error"  # root mean square over blocks, see `measured_error`
COSINE = "1 - cosine"
DIVERGENCE = "divergence (nats a token)"
_POINTS = 200  # of a curve that is drawn


@dataclass(frozen=True)
class Forecast:
    """The error that a factorisation predicts at one size and at all others, without a fit.

    Parameters
    ----------
    measure
        What the error is: `RELATIVE`, `COSINE` or `DIVERGENCE`.
    error
        At the size that was chosen; None where the method cannot tell before it has fitted.
    kept, errors
        The same along the whole curve, fractions of the numbers ascending.
    """

    measure: str = RELATIVE
    error: float | None = None
    kept: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The factors of every layer, within a budget of numbers.

    Parameters
    ----------
    method
        Key of `METHODS`.
    layers
        For each layer, its pieces.
    n_before
        Numbers in the attention's weights and biases as they came.
    layer_numbers
        Numbers that each layer stores now, every factor and every bias that stays counted.
    lost
        The sum of the errors by which the budget was shared out, in the unit of the method.
    forecast
        What these factors err by that sum, and what the other sizes would.
    modules
        Pieces of matrices outside the attention, each `of` its module; `module_numbers` those that they store, with
        their biases.
    """

    method: str
    layers: Sequence[Sequence[Piece]]
    n_before: int
    layer_numbers: Sequence[int]
    lost: float = 0.0
    forecast: Forecast = field(default_factory=Forecast)
    modules: Sequence[Piece] = ()
    module_numbers: int = 0

    @property
    def n_after(self) -> int:
        """Numbers that are stored of all that is compressed."""
        return sum(self.layer_numbers) + self.module_numbers

    @property
    def kept(self) -> float:
        """The fraction of the numbers that is still stored."""
        return self.n_after / self.n_before


@dataclass(frozen=True)
class Factorisation:
    """All layers of a checkpoint, factorised; any fraction can be planned from it."""

    method: str
    layers: Sequence[Factorised]
    n_before: int
    measure: str = RELATIVE
    foretells: bool = True  # whether the errors of its blocks say what the measure will be
    modules: Sequence[Factorised] = ()  # matrices outside the attention, in the same budget

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
        lost = _lost(curves, choice)
        if spent < least and lost > 0:  # with nothing lost, fewer numbers are no fault
            raise ArgumentError(
                f"compress: keep={keep} cannot be met to 1 % by method {self.method!r} on this model, the nearest "
                f"below it is {_rounded_up(spent / self.n_before)}; ask for that, or use another method."
            )
        return choice

    def select(self, keep: float | None, max_error: float | None) -> list[int]:
        """Return an option for every block: the best within `keep`, or the smallest within `max_error` (and `keep`).

        Raises
        ------
        ArgumentError
            If no allocation meets what is asked for.
        """
        if max_error is None:
            return self.choose(1.0 if keep is None else keep)
        if not self.foretells:
            raise ArgumentError(
                f"compress: max_error cannot be met by method {self.method!r}, whose {self.measure} is not known "
                "beforehand; pass keep, or use another method."
            )
        limit = 1.0 if keep is None else keep
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

    @property
    def _fixed(self) -> int:
        return sum(one.fixed for one in (*self.layers, *self.modules))

    @property
    def _curves(self) -> list[Curve]:
        return [curve for one in (*self.layers, *self.modules) for curve in one.curves]

    def _spent(self, choice: Sequence[int]) -> int:
        return self._fixed + sum(int(curve.costs[k]) for curve, k in zip(self._curves, choice, strict=True))

    def _error(self, lost: float) -> float:
        """Blocks lose their squared relative error; gates the mean square of a change, of which an error is half."""
        return math.sqrt(lost / len(self._curves)) if self.measure == RELATIVE else lost / 2

    def _lost_within(self, error: float) -> float:
        return error**2 * len(self._curves) if self.measure == RELATIVE else 2 * error

    def at(self, choice: Sequence[int], progress: Progress = quiet) -> Plan:
        """Return the factors at one option of every block."""
        pieces, numbers = [], []
        parts, start = (*self.layers, *self.modules), 0
        for done, one in enumerate(parts):
            progress("choosing factors", done, len(parts))
            end = start + len(one.curves)
            pieces.append(one.pieces(choice[start:end]))
            numbers.append(one.fixed + sum(piece.n_parameters for piece in pieces[-1]))
            start = end
        progress("choosing factors", len(parts), len(parts))
        lost, n = _lost(self._curves, choice), len(self.layers)
        modules = [piece for found in pieces[n:] for piece in found]
        return Plan(
            self.method, pieces[:n], self.n_before, numbers[:n], lost, self.forecast(lost), modules, sum(numbers[n:])
        )


def _lost(curves: Sequence[Curve], choice: Sequence[int]) -> float:
    return sum(float(curve.errors[option]) for curve, option in zip(curves, choice, strict=True))


def _rounded_up(fraction: float) -> str:
    """Return a fraction in four digits, never less than it is: what is asked for must suffice."""
    return f"{math.ceil(fraction * 1e4) / 1e4:.4f}"


def check_budget(keep: Any, max_error: Any) -> tuple[float | None, float | None]:
    """Return the fraction to keep and the error to allow, at least one of which must be given."""
    if keep is None and max_error is None:
        raise ArgumentError(
            "compress: keep or max_error must be given, got neither; pass for example keep=0.5 (--keep 0.5), the "
            "fraction of the numbers that is still stored."
        )
    if max_error is None:
        return check_keep(keep), None
    real = isinstance(max_error, numbers.Real) and not isinstance(max_error, bool)
    if not real or not 0.0 <= float(max_error) < math.inf:
        raise ArgumentError(
            f"compress: max_error must be a number from 0 on, got {max_error!r}; it is the predicted error that is "
            "allowed, for example 0.02."
        )
    return None if keep is None else check_keep(keep), float(max_error)


def check_keep(keep: Any) -> float:
    """Return the fraction to keep, in (0, 1]."""
    if isinstance(keep, bool) or not isinstance(keep, numbers.Real) or not 0.0 < float(keep) <= 1.0:
        raise ArgumentError(
            f"compress: keep must lie in (0, 1], got {keep!r}; it is the fraction of the attention's numbers "
            "that is still stored, for example 0.5."
        )
    return float(keep)


def check_uncompressed(checkpoint: Checkpoint, *, by_text: bool = False) -> None:
    """Raise if the attention of a checkpoint is stored as factors already, or of a kind that cannot be."""
    if checkpoint.pieces is not None:
        raise ArgumentError(
            f"compress: IN must not be compressed already, got {checkpoint.folder.path}; take the checkpoint that it "
            "was made from."
        )
    row = checkpoint.architecture
    if by_text and row.reads != "tokens":
        raise ArgumentError(
            f"compress: calibrate must be None for a {row.model_type}, because it reads {row.reads}, no text; leave "
            "calibrate out."
        )


def check_method(checkpoint: Checkpoint, method: str, *, by_text: bool = False) -> None:
    """Raise unless the method is known and this checkpoint can be compressed by it."""
    known = BY_TEXT if by_text else tuple(METHODS)
    if method not in known:
        why = (
            f"that works with calibrate is one of {', '.join(known)}"
            if by_text
            else f"must be one of {', '.join(known)}, or, with calibrate, of {', '.join(BY_TEXT)}"
        )
        raise ArgumentError(f"compress: method {why}, got {method!r}; choose one of them.")
    check_uncompressed(checkpoint, by_text=by_text)
    reason = REFUSE[method](checkpoint.sizes) if method in REFUSE else None
    if reason:
        raise ArgumentError(f"compress: method {method!r} cannot run on this model, because {reason}; choose another.")


def factorise(checkpoint: Checkpoint, method: str, progress: Progress = quiet) -> Factorisation:
    """Factorise the attention of every layer by a method of `METHODS`.

    Raises
    ------
    ArgumentError
        If the method is not known, this model cannot run it, or the checkpoint is already compressed.
    """
    check_method(checkpoint, method)
    layers, n_before = [], 0
    make = (TURNED if turns(checkpoint) else METHODS)[method]
    for layer in range(checkpoint.n_layers):
        progress("factorising", layer, checkpoint.n_layers)
        projections = checkpoint.projections(layer)
        n_before += sum(a.size for a in [*projections.weights.values(), *projections.biases.values()])
        layers.append(make(projections, checkpoint.sizes))
    progress("factorising", checkpoint.n_layers, checkpoint.n_layers)
    return Factorisation(method, layers, n_before, foretells=method not in UNPREDICTED)


def turns(checkpoint: Checkpoint) -> bool:
    """Whether anything but a product stands between queries and keys: rotary embeddings, or norms."""
    row = checkpoint.architecture
    frequencies = read_frequencies(row, checkpoint.config, checkpoint.sizes.d_head, None, "compress")
    return frequencies is not None or row.qk_norm is not None
