"""The factors of a checkpoint at one size, as they are to be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tnlib_adapters.compression.evaluation.error_measures import Forecast
from tnlib_adapters.factors.attention_factors import Piece


@dataclass(frozen=True)
class Plan:
    """The factors of every layer, within a budget of numbers.

    Parameters
    ----------
    method
        What the factors were found by.
    layers
        For each layer, its pieces.
    n_before
        Numbers of all that is compressed, as it came.
    layer_numbers
        Numbers that each layer stores now, every factor and every bias that stays counted.
    forecast
        What these factors err, and what other sizes would.
    modules
        Pieces of matrices outside the attention, each `of` its module.
    module_numbers
        Numbers that they store, with their biases.
    """

    method: str
    layers: Sequence[Sequence[Piece]]
    n_before: int
    layer_numbers: Sequence[int]
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
