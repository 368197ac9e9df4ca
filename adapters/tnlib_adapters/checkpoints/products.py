"""The four projections of a layer, each one matrix or the product of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.projections import NAMES, Projections, Sizes, n_out


@dataclass(frozen=True)
class Products:
    """Weights that act on rows, as matrices to be multiplied.

    Parameters
    ----------
    factors
        For each of "q", "k", "v", "o" the matrices whose product is the weight; that of "q", "k" or "v" has the bias as
        a last row beyond the inputs, or no such row.
    biased
        The projections that have a bias: one that no row holds is 0, that of "o" is `output_bias`.
    """

    factors: Mapping[str, tuple[Array, ...]]
    biased: frozenset[str] = frozenset()
    output_bias: Array | None = None

    def expand(self, sizes: Sizes) -> Projections:
        """Multiply everything out."""
        weights, biases = {}, {}
        for name in NAMES:
            whole = reduce(np.matmul, self.factors[name])
            n_in = sizes.widths["o"] if name == "o" else sizes.d_model
            weights[name] = whole[:n_in]
            if name in self.biased:
                biases[name] = whole[n_in] if len(whole) > n_in else np.zeros(n_out(sizes, name))
        return Projections(weights, biases | ({} if self.output_bias is None else {"o": self.output_bias}))
