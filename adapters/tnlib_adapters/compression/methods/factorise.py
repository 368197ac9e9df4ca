"""Factorise a layer, or single weights, by a row of the table of methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.table import Method, resolve
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes


class FactorisedMatrix(Protocol):
    """Factorised weight (in, out), the result of a method of unit "matrix"."""

    @property
    def curve(self) -> Curve:
        """Stored numbers and squared relative error of every option, by ascending size."""

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of one option, with `of` and `module` left empty."""


class WeightOptions:
    """Options of a factorised weight: its factors while smaller than the weight, then the dense weight."""

    def __init__(self, weight: Array, factorised: FactorisedMatrix, bias: Array | None = None) -> None:
        self._weight, self._factorised, self._bias = weight, factorised, bias
        curve = factorised.curve
        self._smaller = np.flatnonzero(curve.costs < weight.size)
        costs = np.append(curve.costs[self._smaller], weight.size) + (0 if bias is None else bias.size)
        self.curve = Curve(costs, np.append(curve.errors[self._smaller], 0.0))

    def at(self, option: int, of: str = "") -> FactoredMatrix:
        """Return the factors of one option as those of projection `of`, or of a module's weight."""
        if option == len(self._smaller):
            factorised = FactoredMatrix("dense", of, {whole_part(of): self._weight})
        else:
            factorised = replace(self._factorised.at(int(self._smaller[option])), of=of)
        bias = {} if self._bias is None else {"bias": self._bias}
        return replace(factorised, arrays={**factorised.arrays, **bias})


class PerWeight:
    """Projections of an attention layer, each factorised by a method of single weights; biases unchanged.

    `of` names the factorised projections. If they are not all four, their biases are stored among the factors,
    because one tensor may hold biases of several projections.
    """

    def __init__(
        self, projections: Projections, factorise: Callable[[str, Array], FactorisedMatrix], of: Sequence[str] = NAMES
    ) -> None:
        biases = {name: bias for name, bias in projections.biases.items() if name in of}
        stored = biases if set(of) != set(NAMES) else {}
        self._options = {
            name: WeightOptions(projections.weights[name], factorise(name, projections.weights[name]), stored.get(name))
            for name in of
        }
        self.curves = [options.curve for options in self._options.values()]
        self.fixed = 0 if stored else sum(bias.size for bias in biases.values())

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors at option choice[k] of weight k."""
        return [options.at(option, name) for (name, options), option in zip(self._options.items(), choice, strict=True)]


class ModuleWeight:
    """Weight of a module outside the attention, factorised by a method of single weights; bias unchanged."""

    def __init__(self, weight: Array, factorised: FactorisedMatrix, n_bias: int) -> None:
        self._options, self.fixed = WeightOptions(weight, factorised), n_bias
        self.curves = [self._options.curve]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors at one option."""
        return [self._options.at(choice[0])]


def factorise_layer(method: Method, projections: Projections, sizes: Sizes, *, rotary: bool = False) -> Factorised:
    """Factorise the attention of a layer.

    Parameters
    ----------
    method
        A row of unit "matrix" or "layer".
    projections, sizes
        Of the layer.
    rotary
        True if rotary embeddings or norms act between queries and keys.
    """
    if method.unit == "matrix":
        return PerWeight(projections, lambda _, weight: factorise_weight(method, weight))
    return cast(Factorised, resolve((method.rotary if rotary else None) or method.factorise)(projections, sizes))


def factorise_weight(method: Method, weight: Array) -> FactorisedMatrix:
    """Factorise one weight (in, out) by a row of unit "matrix"."""
    return cast(FactorisedMatrix, resolve(method.factorise)(weight))
