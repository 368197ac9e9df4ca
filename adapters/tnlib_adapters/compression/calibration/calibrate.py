"""Method "calibrated": weights by components that a text orders, rank selection, fits of blocks and of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.calibration.statistics import GroupFactorisation, Statistics, WeightGroup
from tnlib_adapters.compression.methods.components import (
    Components,
    components_on_device,
    moments_of_rows,
    table_components,
)
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences
from tnlib_adapters.factors import UNEMBEDDING
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.model_weights import ModelWeight

# Losses of unembeddings count twice: the fit lowers those of layers, and unembeddings are not fitted. All of the
# built-in Llama at a quarter: 0.750 nats a token, 0.818 where they count four times; at one half the same by both
_NOT_FITTED = 2


@dataclass(frozen=True)
class ComponentOptions:
    """A weight by a number of its components while their factors are smaller than the weight, then the dense weight.

    All heads of a projection share its components, so rotary embeddings and norms may act between queries and keys.
    """

    weight: Array  # (in, out), or (in + 1, out) with the bias of a projection as the last row, see `with_bias_row`
    components: Components  # of `weight`
    name: str = ""  # of a projection of the attention, "" for the weight of a module
    has_bias_row: bool = False  # True if the last row of `weight` is the bias
    is_biased: bool = False  # True if the projection has a bias: 0 where no row holds it
    output_bias: Array | None = None  # of projection "o"
    gauged: bool = True  # False for a table: a look-up needs all rows of a factor, and gauge freedom stays
    looked_up: bool = False  # True for a table without predictions

    @property
    def curve(self) -> Curve:
        """Numbers and losses of 0, 1, ... components, then of the dense weight."""
        n_dense = (self._n_in + self._stores_bias) * self.weight.shape[1]
        curve = self.components.curve(n_dense, gauged=self.gauged, looked_up=self.looked_up)
        return curve if self.output_bias is None else replace(curve, costs=curve.costs + self.output_bias.size)

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of an option, in the gauge of the components."""
        bias = {} if self.output_bias is None else {"bias": self.output_bias}
        if option < len(self.curve.costs) - 1:
            left, right = self.components.first(option)
            return self._matrix("low_rank", {"left": left, "right": right} | bias, self.name * self.is_biased)
        if self._stores_bias:
            bias = {"bias": self.weight[-1] if self.has_bias_row else np.zeros(self.weight.shape[1])}
        return self._matrix("dense", {whole_part(self.name): self.weight[: self._n_in]} | bias)

    def _matrix(self, kind: str, arrays: Mapping[str, Array], biases: str = "") -> FactoredMatrix:
        cast = {part: a.astype(self.weight.dtype, copy=False) for part, a in arrays.items()}
        return FactoredMatrix(kind, self.name, cast, biases=biases)

    @property
    def _n_in(self) -> int:
        return len(self.weight) - self.has_bias_row

    @property
    def _stores_bias(self) -> bool:
        return self.is_biased and self.name != "o"


def _decompositions(device: str, group: WeightGroup) -> Iterator[Callable[[], Components]]:
    """Yield the decomposition of each weight of a block by its moments."""
    for read in group.weights:
        values = _with_bias(*read)
        yield partial(components_on_device, values, *_moments(read.weight, values, group.statistics), device)


def _moments(weight: ModelWeight, values: Array, statistics: Statistics) -> tuple[Array, Array]:
    return statistics.reads_of(weight, len(values)), statistics.slopes[weight.key]


def _calibrated_parts(device: str, group: WeightGroup) -> dict[str, Factorised]:
    """Return the weights of a group by their components with measured losses."""
    options = list[ComponentOptions]()
    for weight, stored, bias in group.weights:
        values = _with_bias(weight, stored, bias)
        of_weight = ComponentOptions(
            values,
            _components_of(weight, values, group.statistics, device),
            weight.of,
            has_bias_row=len(values) > len(stored),
            is_biased=bias is not None,
            output_bias=bias if weight.of == "o" else None,
            gauged=not weight.is_table,
            looked_up=weight.is_table and weight.tied_key is None,
        )
        options.append(of_weight)
    return group.by_module(options)


def _with_bias(weight: ModelWeight, values: Array, bias: Array | None) -> Array:
    """Return the values that are decomposed; the bias of the output projection is stored beside them."""
    return values if weight.of == "o" else with_bias_row(values, bias)


def with_bias_row(weight: Array, bias: Array | None) -> Array:
    """Return a weight (in, out), with its bias as the last row if that is not 0."""
    return weight if bias is None or not np.any(bias) else np.concatenate([weight, bias[None]])


def _components_of(weight: ModelWeight, values: Array, statistics: Statistics, device: str) -> Components:
    """Return the components of a weight (in, out), which may have its bias as a last row.

    Inside a block, losses are measured. With N tokens and n texts, the loss of look-ups is tr(P E^T diag(counts) E) /
    N, and that of predictions tr(G E^T A E) / N with the moments G of gradients at the input of the unembedding, both
    divided by n.
    """
    if weight.key in statistics.components:
        return statistics.components[weight.key]
    if weight.key in statistics.losses:  # of an earlier run
        components = components_on_device(values, *_moments(weight, values, statistics), device)
        return components.with_losses(statistics.losses[weight.key])
    reads, slopes = _moments(weight, values, statistics)
    _, n_tokens, n_texts = statistics.scales[weight.key]
    scale = 1 / n_tokens / n_texts
    if weight.role == UNEMBEDDING:
        table = table_components(values.T, [(slopes, reads)])
        return Components(table.right.T, table.left.T, table.losses).scaled(scale)
    if weight.tied_key is None:
        return components_on_device(values, reads, slopes, device).scaled(scale)
    predicts = statistics.slopes[weight.tied_key], statistics.reads[weight.tied_key]
    return table_components(values, [(moments_of_rows(values, reads), slopes), predicts]).scaled(scale)


def factorise_calibrated(
    source: SourceModel, text: TokenSequences, request: Request, workspace: Workspace | None = None
) -> Factorisation:
    """Factorise the weights of a request by their components, see `factorise_and_fit`."""
    from tnlib_adapters.compression.calibration.factorise_and_fit import factorise_and_fit

    factorise = calibrated_factorisation(request.run.device)
    return factorise_and_fit(source, text, request, workspace, factorise, _NOT_FITTED)


def calibrated_factorisation(device: str) -> GroupFactorisation:
    """Return the factorisation by components, large weights decomposed on a device of torch."""
    return GroupFactorisation(partial(_calibrated_parts, device), partial(_decompositions, device))
