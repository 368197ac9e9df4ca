"""From a checkpoint and a fraction to keep, to the factors of every layer."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tnlib import ArgumentError
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.checkpoints.rope import read_frequencies
from tnlib_adapters.compression.allocate import Curve, allocate
from tnlib_adapters.compression.methods import METHODS, REFUSE, TURNED, Factorised

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress."""


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
    """

    method: str
    layers: Sequence[Sequence[Piece]]
    n_before: int
    layer_numbers: Sequence[int]
    lost: float = 0.0

    @property
    def n_after(self) -> int:
        """Numbers that are stored in all layers."""
        return sum(self.layer_numbers)

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
        fixed = sum(layer.fixed for layer in self.layers)
        curves = [curve for layer in self.layers for curve in layer.curves]
        choice = allocate(curves, budget - fixed, max(0, least - fixed))
        if choice is None:
            smallest = (fixed + sum(int(curve.costs[0]) for curve in curves)) / self.n_before
            raise ArgumentError(
                f"compress: keep must be at least {_rounded_up(smallest)} for method {self.method!r} on this model, "
                f"got {keep}; below it not even the smallest factors fit."
            )
        spent = fixed + sum(int(curve.costs[option]) for curve, option in zip(curves, choice, strict=True))
        lost = _lost(curves, choice)
        if spent < least and lost > 0:  # with nothing lost, fewer numbers are no fault
            raise ArgumentError(
                f"compress: keep={keep} cannot be met to 1 % by method {self.method!r} on this model, the nearest "
                f"below it is {_rounded_up(spent / self.n_before)}; ask for that, or use another method."
            )
        return choice

    def at(self, choice: Sequence[int], progress: Progress = quiet) -> Plan:
        """Return the factors at one option of every block."""
        layers = self._pieces(choice, progress)
        numbers = [
            layer.fixed + sum(piece.n_parameters for piece in pieces)
            for layer, pieces in zip(self.layers, layers, strict=True)
        ]
        curves = [curve for layer in self.layers for curve in layer.curves]
        return Plan(self.method, layers, self.n_before, numbers, _lost(curves, choice))

    def _pieces(self, choice: Sequence[int], progress: Progress) -> list[list[Piece]]:
        pieces, start = [], 0
        for done, layer in enumerate(self.layers):
            progress("choosing factors", done, len(self.layers))
            end = start + len(layer.curves)
            pieces.append(layer.pieces(choice[start:end]))
            start = end
        progress("choosing factors", len(self.layers), len(self.layers))
        return pieces


def _lost(curves: Sequence[Curve], choice: Sequence[int]) -> float:
    return sum(float(curve.errors[option]) for curve, option in zip(curves, choice, strict=True))


def _rounded_up(fraction: float) -> str:
    """Return a fraction in four digits, never less than it is: what is asked for must suffice."""
    return f"{math.ceil(fraction * 1e4) / 1e4:.4f}"


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
    if by_text and (row.alibi or row.qk_norm or row.fused == "groups" or row.in_memory):
        raise ArgumentError(
            f"compress: attention of a {row.model_type} cannot be calibrated yet, because its heads know their "
            "distance by slopes, norm their queries, or are stored in an order of their own; leave calibrate out."
        )


def check_method(checkpoint: Checkpoint, method: str, *, by_text: bool = False) -> None:
    """Raise unless the method is known and this checkpoint can be compressed by it."""
    if method not in tuple(METHODS):
        raise ArgumentError(
            f"compress: method must be one of {', '.join(METHODS)}, got {method!r}; choose one of them."
        )
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
    make = (TURNED if _turns(checkpoint) else METHODS)[method]
    for layer in range(checkpoint.n_layers):
        progress("factorising", layer, checkpoint.n_layers)
        projections = checkpoint.projections(layer)
        n_before += sum(a.size for a in [*projections.weights.values(), *projections.biases.values()])
        layers.append(make(projections, checkpoint.sizes))
    progress("factorising", checkpoint.n_layers, checkpoint.n_layers)
    return Factorisation(method, layers, n_before)


def _turns(checkpoint: Checkpoint) -> bool:
    """Whether anything but a product stands between queries and keys: rotary embeddings, or norms."""
    row = checkpoint.architecture
    frequencies = read_frequencies(row, checkpoint.config, checkpoint.sizes.d_head, None, "compress")
    return frequencies is not None or row.qk_norm is not None
