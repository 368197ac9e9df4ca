"""Weights by components that calibration data order, stored without gauge freedom, and biases of an attention layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.interpolative import pack
from tnlib_adapters.factors.projections import Projections, Sizes


@dataclass(frozen=True)
class ProjectionBias:
    """Name, inputs and biases of a projection of the attention; the weight of a module has the name ""."""

    name: str
    n_in: int  # inputs, without a bias row
    is_biased: bool = False  # the bias is 0 where no row of the weight holds it
    output_bias: Array | None = None  # of projection "o"

    @property
    def has_bias_row(self) -> bool:
        """True if the last row of the weight may be its bias."""
        return self.is_biased and self.name != "o"


class ComponentOptions:
    """A weight by a number of its components while their factors are smaller than the weight, then the dense weight.

    All heads of a projection share its components, so rotary embeddings and norms may act between queries and keys.

    Parameters
    ----------
    weight
        (in, out); of a projection with its bias as the last row, see `with_bias_row`.
    components
        Of `weight`.
    projection
        Of the attention, with its biases; None for the weight of a module.
    gauged
        True if factors are stored without gauge freedom: not for a table, where a look-up needs all rows of a factor.
    looked_up
        True for a table without predictions.
    """

    def __init__(
        self,
        weight: Array,
        components: Components,
        projection: ProjectionBias | None = None,
        *,
        gauged: bool = True,
        looked_up: bool = False,
    ) -> None:
        self.weight, self.components = weight, components
        self.projection = projection or ProjectionBias("", len(weight))
        self._gauged, self._looked_up = gauged, looked_up

    @property
    def curve(self) -> Curve:
        """Numbers and losses of 0, 1, ... components, then of the dense weight."""
        n_dense = (self.projection.n_in + self.projection.has_bias_row) * self.weight.shape[1]
        curve = self.components.curve(n_dense, gauged=self._gauged, looked_up=self._looked_up)
        bias = self.projection.output_bias
        return curve if bias is None else replace(curve, costs=curve.costs + bias.size)

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of an option."""
        return self.packed(self.factors(option), self.projection.output_bias)

    def factors(self, option: int) -> tuple[Array, ...]:
        """Return the matrices that are multiplied and fitted; () for a dense weight that is no projection."""
        if option < len(self.curve.costs) - 1:
            return self.components.first(option)
        return (self.weight,) if self.projection.name else ()

    def packed(self, factors: Sequence[Array], output_bias: Array | None = None) -> FactoredMatrix:
        """Return the factored matrix with these factors."""
        projection = self.projection
        bias = {"bias": output_bias} if projection.name == "o" and output_bias is not None else {}
        if len(factors) == 2 and self._gauged:
            left, right, rows = pack(*(factor.astype(np.float64) for factor in factors))
            biases = projection.name * projection.is_biased
            return self._matrix("interpolative", {"left": left, "right": right} | bias, rows=rows, biases=biases)
        if len(factors) == 2:
            return self._matrix("low_rank", {"left": factors[0], "right": factors[1]})
        (weight,) = factors or (self.weight,)
        if projection.has_bias_row:
            bias = {"bias": weight[projection.n_in] if len(weight) > projection.n_in else np.zeros(weight.shape[1])}
        return self._matrix("dense", {whole_part(projection.name): weight[: projection.n_in]} | bias)

    def _matrix(self, kind: str, arrays: Mapping[str, Array], **stored: Any) -> FactoredMatrix:
        cast = {part: a.astype(self.weight.dtype, copy=False) for part, a in arrays.items()}
        return FactoredMatrix(kind, self.projection.name, cast, **stored)


def projection_options(folded: Projections, name: str, components: Components) -> ComponentOptions:
    """Return a projection with folded biases by the components of `with_bias_row`."""
    output_bias = folded.biases.get("o") if name == "o" else None
    projection = ProjectionBias(name, len(folded.weights[name]), name in folded.biases, output_bias)
    return ComponentOptions(with_bias_row(folded, name), components, projection)


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
