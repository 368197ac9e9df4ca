"""Factorise a layer, or single weights, by a row of the table of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.method_table import Method, resolve
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes


class FactorisedMatrix(Protocol):
    """Factorised weight (in, out), the result of a method of unit "matrix"."""

    @property
    def curve(self) -> Curve:
        """Stored numbers and squared relative error of every option, by ascending size."""

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of one option, with `of` and `module` left empty."""


class WeightOptions(Protocol):
    """A weight with several stored forms."""

    @property
    def curve(self) -> Curve:
        """Stored numbers or bits, and error, of every option."""

    def at(self, option: int) -> FactoredMatrix:
        """Return the weight in the form of an option."""


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


class FactorisedWeight:
    """Options of a factorised weight: its factors while smaller than the weight, then the dense weight."""

    def __init__(self, weight: Array, factorised: FactorisedMatrix, of: str = "", bias: Array | None = None) -> None:
        self._weight, self._factorised, self._of, self._bias = weight, factorised, of, bias
        curve = factorised.curve
        self._smaller = np.flatnonzero(curve.costs < weight.size)
        costs = np.append(curve.costs[self._smaller], weight.size) + (0 if bias is None else bias.size)
        self.curve = Curve(costs, np.append(curve.errors[self._smaller], 0.0))

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of one option."""
        if option == len(self._smaller):
            factorised = FactoredMatrix("dense", self._of, {whole_part(self._of): self._weight})
        else:
            factorised = replace(self._factorised.at(int(self._smaller[option])), of=self._of)
        bias = {} if self._bias is None else {"bias": self._bias}
        return replace(factorised, arrays={**factorised.arrays, **bias})


def factorise_projections(
    projections: Projections, factorise: Callable[[Array], FactorisedMatrix], of: Sequence[str] = NAMES
) -> ModuleWeights:
    """Factorise projections of an attention layer one by one; biases unchanged.

    If they are not all four, their biases are stored among the factors, because one tensor may hold biases of several
    projections.
    """
    biases = {name: bias for name, bias in projections.biases.items() if name in of}
    stored = biases if set(of) != set(NAMES) else {}
    weights = {
        name: FactorisedWeight(weight, factorise(weight), name, stored.get(name))
        for name, weight in projections.weights.items()
        if name in of
    }
    return ModuleWeights(weights, 0 if stored else sum(bias.size for bias in biases.values()))


def factorise_layer(method: Method, projections: Projections, sizes: Sizes, *, rotary: bool = False) -> Factorised:
    """Factorise the attention of a layer by a row of unit "matrix" or "layer".

    `rotary` is True if rotary embeddings or norms act between queries and keys.
    """
    if method.unit == "matrix":
        return factorise_projections(projections, partial(factorise_weight, method))
    return cast(Factorised, resolve((method.rotary if rotary else None) or method.factorise)(projections, sizes))


def factorise_weight(method: Method, weight: Array) -> FactorisedMatrix:
    """Factorise one weight (in, out) by a row of unit "matrix"."""
    return cast(FactorisedMatrix, resolve(method.factorise)(weight))
