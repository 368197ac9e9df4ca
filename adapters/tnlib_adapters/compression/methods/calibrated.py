"""Attention of a layer by components of its weights, ordered by calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.interpolative import pack
from tnlib_adapters.factors.projections import NAMES, Products, Projections, Sizes


class CalibratedLayer:
    """W_Q, W_K, W_V and W_O, each as a chosen number of its components, stored without gauge freedom.

    All heads of a weight share its components, so rotary embeddings and norms may act between queries and keys.
    Biases are rows of their weights, except those that `fold_biases` has set to 0.

    Parameters
    ----------
    folded
        Projections with folded biases.
    components
        Of `with_bias_row` of every projection.
    """

    fixed = 0

    def __init__(self, folded: Projections, components: Mapping[str, Components]) -> None:
        self._weights = {name: with_bias_row(folded, name) for name in NAMES}
        self._biased, self._output_bias = frozenset(folded.biases), folded.biases.get("o")
        self._dtype = folded.weights["q"].dtype
        self.components = components

    @property
    def curves(self) -> list[Curve]:
        """Curve of every weight: its components, then the dense weight."""
        return [self._curve(name) for name in NAMES]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors with choice[k] components of projection k; the last option is the dense weight."""
        return self.packed(self.products(choice))

    def products(self, choice: Sequence[int]) -> Products:
        """Return the factors as matrices to be multiplied."""
        factors = {}
        for name, rank, curve in zip(NAMES, choice, self.curves, strict=True):
            dense = rank == len(curve.costs) - 1
            factors[name] = (self._weights[name],) if dense else self.components[name].first(rank)
        return Products(factors, self._biased, self._output_bias)

    def packed(self, products: Products) -> list[FactoredMatrix]:
        """Return the factored matrices with these factors."""
        return [self._factored(name, products.factors[name], products.output_bias) for name in NAMES]

    def _factored(self, name: str, factors: Sequence[Array], output_bias: Array | None) -> FactoredMatrix:
        bias = {"bias": output_bias} if name == "o" and output_bias is not None else {}
        if len(factors) == 2:
            left, right, rows = pack(*(factor.astype(np.float64) for factor in factors))
            arrays = {"left": left, "right": right} | bias
            held = name if name in self._biased else ""
            return FactoredMatrix("interpolative", name, self._cast(arrays), rows=rows, biases=held)
        (weight,) = factors
        if name in self._biased and name != "o":
            n_in = self._n_in(name)
            bias = {"bias": weight[n_in] if len(weight) > n_in else np.zeros(weight.shape[1])}
            weight = weight[:n_in]
        return FactoredMatrix("dense", name, self._cast({"weight": weight} | bias))

    def _cast(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {part: a.astype(self._dtype) for part, a in arrays.items()}

    def _curve(self, name: str) -> Curve:
        m, n = self._n_in(name), self._weights[name].shape[1]
        n_dense = m * n + (n if name in self._biased and name != "o" else 0)
        curve = self.components[name].curve(n_dense, gauged=True)
        return curve if name != "o" or self._output_bias is None else replace(curve, costs=curve.costs + n)

    def _n_in(self, name: str) -> int:
        return len(self._weights["o"]) if name == "o" else self._weights["o"].shape[1]


def with_bias_row(folded: Projections, name: str) -> Array:
    """Return a weight, with its bias as the last row if that is not 0; the output bias is not included."""
    weight, bias = folded.weights[name], folded.biases.get(name)
    if name == "o" or bias is None or not np.any(bias):
        return weight
    return np.concatenate([weight, bias[None]])


def fold_biases(projections: Projections, sizes: Sizes, *, keys: bool) -> Projections:
    """Return projections with b_K = 0 if `keys`, and with b_V moved into the output bias if there is one.

    b_K adds a constant to all scores of a query, which softmax removes, and the rows of a pattern sum to 1.
    """
    biases = dict(projections.biases)
    if keys and "k" in biases:
        biases["k"] = np.zeros_like(biases["k"])
    if "v" in biases and "o" in biases:
        by_head = sizes.repeated(biases["v"].reshape(sizes.kv_heads, -1))
        added = by_head.ravel().astype(np.float64) @ projections.weights["o"]
        biases["o"] = (biases["o"] + added).astype(biases["o"].dtype)
        biases["v"] = np.zeros_like(biases["v"])
    return Projections(projections.weights, biases)
