"""The weights of a block, each one matrix or the product of two."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from tnlib_adapters.factors.projections import NAMES, Projections, Sizes


@dataclass(frozen=True)
class Products:
    """Weights that act on rows, as matrices to be multiplied: arrays, or tensors of another library.

    Parameters
    ----------
    factors
        For "q", "k", "v" and "o", all or none of them, and for modules outside the attention, by name, the matrices
        whose product is the weight; that of "q", "k" or "v" has the bias as a last row beyond the inputs, or no such
        row. Biases of modules are no part of it.
    biased
        The projections that have a bias: one that no row holds is 0, that of "o" is `output_bias`.
    """

    factors: Mapping[str, tuple[Any, ...]]
    biased: frozenset[str] = frozenset()
    output_bias: Any = None

    def expand(self, sizes: Sizes) -> Projections:
        """Multiply the attention out: all of its projections, or none."""
        weights, biases = {}, {}
        for name in (name for name in NAMES if name in self.factors):
            whole = self._whole(name)
            n_in = sizes.widths["o"] if name == "o" else sizes.d_model
            weights[name] = whole[:n_in]
            if name in self.biased:
                biases[name] = whole[n_in:].sum(0)  # of one row, or of none
        return Projections(weights, biases | ({} if self.output_bias is None else {"o": self.output_bias}))

    def modules(self) -> dict[str, Any]:
        """Multiply the weights outside the attention out."""
        return {name: self._whole(name) for name in self.factors if name not in NAMES}

    def beside(self, modules: Mapping[str, tuple[Any, ...]]) -> Products:
        """Return these and the matrices of modules outside the attention."""
        return replace(self, factors={**self.factors, **modules})

    def each(self, function: Callable[..., Any], *others: Products) -> Products:
        """Return what a function makes of every matrix and of the output bias, with those of others beside it."""
        factors = {
            name: tuple(map(function, held, *(other.factors[name] for other in others)))
            for name, held in self.factors.items()
        }
        bias = None if self.output_bias is None else function(self.output_bias, *(one.output_bias for one in others))
        return Products(factors, self.biased, bias)

    @property
    def parts(self) -> list[Any]:
        """Every matrix and the output bias."""
        bias = [] if self.output_bias is None else [self.output_bias]
        return [one for held in self.factors.values() for one in held] + bias

    def _whole(self, name: str) -> Any:
        return reduce(operator.matmul, self.factors[name])
