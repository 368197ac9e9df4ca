"""Weights of a block as products of matrices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from tnlib_adapters.factors.projections import NAMES, Projections, Sizes


@dataclass(frozen=True)
class Products:
    """Weights that act on rows, each a product of matrices: arrays, or tensors of another library.

    Parameters
    ----------
    factors
        Name -> matrices whose product is the weight: all or none of "q", "k", "v" and "o", and modules outside the
        attention. The product of "q", "k" or "v" may have the bias as an additional last row. Biases of modules are not
        included.
    biased
        The projections that have a bias: 0 if no row holds it; that of "o" is `output_bias`.
    """

    factors: Mapping[str, tuple[Any, ...]]
    biased: frozenset[str] = frozenset()
    output_bias: Any = None

    def expand(self, sizes: Sizes) -> Projections:
        """Multiply out the projections of the attention."""
        weights, biases = {}, {}
        for name in (name for name in NAMES if name in self.factors):
            product = self._product(name)
            n_in = sizes.widths["o"] if name == "o" else sizes.d_model
            weights[name] = product[:n_in]
            if name in self.biased:
                biases[name] = product[n_in:].sum(0)  # one row, or none
        return Projections(weights, biases | ({} if self.output_bias is None else {"o": self.output_bias}))

    def modules(self) -> dict[str, Any]:
        """Multiply out the weights outside the attention."""
        return {name: self._product(name) for name in self.factors if name not in NAMES}

    def beside(self, modules: Mapping[str, tuple[Any, ...]]) -> Products:
        """Return the products with those of modules outside the attention added."""
        return replace(self, factors={**self.factors, **modules})

    def each(self, function: Callable[..., Any], *others: Products) -> Products:
        """Apply a function to every matrix and the output bias, with those of `others` as further arguments."""
        factors = {
            name: tuple(map(function, held, *(other.factors[name] for other in others)))
            for name, held in self.factors.items()
        }
        bias = (
            None if self.output_bias is None else function(self.output_bias, *(other.output_bias for other in others))
        )
        return Products(factors, self.biased, bias)

    @property
    def parts(self) -> list[Any]:
        """Every matrix and the output bias."""
        bias = [] if self.output_bias is None else [self.output_bias]
        return [matrix for matrices in self.factors.values() for matrix in matrices] + bias

    def _product(self, name: str) -> Any:
        return reduce(operator.matmul, self.factors[name])
