"""Calibrated rounding of all layers: moments of a text, bit allocation, rounding, and block-wise reconstruction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import LayerWiring, Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.collect_calibration import WeightGroup
from tnlib_adapters.compression.calibration.fit_by_block import ChosenWeights, factorise_and_fit
from tnlib_adapters.compression.calibration.statistics import Statistics
from tnlib_adapters.compression.compressed_part import (
    attention_tensors,
    compressed_weights,
    count_compressed,
    float_width,
    names_of,
)
from tnlib_adapters.compression.engine_layouts import ENGINES, GGUF
from tnlib_adapters.compression.methods.components import damped, moments_of_rows, nearest_kronecker_product
from tnlib_adapters.compression.methods.factorisation import Factorisation, ModuleWeights
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.methods.quantized import Forms, Metric, QuantizedWeight, RoundedProduct, StoredBias
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import NAMES, Projections

if TYPE_CHECKING:
    from tnlib_adapters.instrument.rounded_fit import RoundedBlock, RoundedFit
    from tnlib_adapters.instrument.running_model import RunningModel

# bits per parameter; products of two factors are worth it below, and to measure their losses takes time
_LEAST_WHOLE = {"low": 2.5, "default": 3.5, "high": 3.5}
_NEGLIGIBLE = 1e-6  # of the mean moment, added before an inverse is applied


def factorise_quantized(
    source: SourceModel, text: TokenSequences, request: Request, workspace: Workspace | None = None
) -> Factorisation:
    """Round the weights of a request, see `factorise_and_fit`; costs are bits."""
    return factorise_and_fit(source, text, request, workspace, partial(_rounded_parts, forms_of(request)), fit_rounded)


def forms_of(request: Request) -> Forms:
    """Return the forms of weights that are options for a request."""
    budget, least = request.budget, _LEAST_WHOLE[request.effort]
    if request.layout in ENGINES:
        engine = ENGINES[request.layout]
        widths, groups = (*(engine.super_bits or engine.bits),), engine.groups
        if budget.width is not None:
            widths, groups = (budget.width,), tuple(group for group in groups if group)
        in_blocks = request.layout == GGUF
        return Forms(False, widths=widths, groups=groups, has_zero=True, in_blocks=in_blocks, fused=engine.fuses)
    if budget.width is not None:
        return Forms(factors=False, widths=(budget.width,), groups=(0,))
    factors = budget.keep is not None or budget.max_error is not None or (budget.bits or least) < least
    return Forms(factors, budget.keep is not None)


def check_bits(request: Request, checkpoint: Checkpoint) -> None:
    """Raise if the smallest forms of all weights, with their biases, take more than the bits of a budget."""
    bits, sizes, wiring = request.budget.bits, checkpoint.sizes, checkpoint.wiring
    if bits is None or not request.in_bits:
        return
    forms = forms_of(request)
    sides = {of: (sizes.d_model, sizes.widths[of]) for of in NAMES} | {"o": (sizes.widths["o"], sizes.d_model)}
    of_layer = sum(forms.fewest_bits(shape, by_row=False) for shape in sides.values())
    fewest = of_layer * len(wiring.projection_layers(request.what))
    for name in names_of(checkpoint, request.what, with_text=True):
        linear = wiring.matrices[name]
        m, n = checkpoint.folder.tensors[linear.weight].shape
        fewest += forms.fewest_bits((n, m) if linear.stored == "out_in" else (m, n), by_row=wiring.is_embedding(name))
    biases = compressed_weights(checkpoint, request.what, with_text=True).values()
    fewest += sum(8 * (bias.end - bias.begin) for bias in biases if bias is not None)
    n_parameters = count_compressed(checkpoint, request.what, with_text=True)
    if fewest > math.floor(bits * n_parameters):
        least = math.ceil(100 * fewest / n_parameters) / 100
        raise ArgumentError(
            f"compress: bits must be at least {least:g} for layout {request.layout!r} on this model, whose smallest "
            f"integers, with scales and biases, take {fewest / 8e6:.2f} MB, got {bits:g}; raise it."
        )


def _rounded_parts(forms: Forms, checkpoint: Checkpoint, group: WeightGroup) -> dict[str, ModuleWeights]:
    """Return the options of all weights of a group."""
    layer = {} if group.projections is None else {group.module: _layer(checkpoint, group, forms)}
    parts = layer | {name: _matrix(checkpoint, group, name, forms) for name in group.weights}
    if forms.fused:
        _fuse(checkpoint.wiring.layers[group.index], group.module, parts)
    return parts


def _fuse(layer: LayerWiring, attention_module: str, parts: Mapping[str, ModuleWeights]) -> None:
    """Fuse the weights that read one input: queries, keys and values, and gate and up."""
    projections = {linear: of for of, linear in layer.attention.projections.items()}
    for inputs in (layer.attention.inputs, *(part.inputs for part in layer.feed_forward_layers)):
        keys = [(attention_module, projections[m]) if m in projections else (m.name, "") for m in inputs]
        weights = [cast(QuantizedWeight, parts[module].weights[of]) for module, of in keys if module in parts]
        if weights:
            weights[0].fuse(weights[1:], inputs[0].name)


def fit_rounded(
    _: RunningModel, chosen: ChosenWeights
) -> tuple[RoundedFit, Callable[[RoundedBlock, str, QuantizedWeight], FactoredMatrix]]:
    """Return the fit of the chosen integers, and the function that packs them."""
    from tnlib_adapters.instrument.rounded_fit import RoundedBlock, RoundedFit

    def start(k: int) -> RoundedBlock:
        products, biases = dict[str, RoundedProduct](), dict[str, Array]()
        for name, weight, option in chosen.of_block(k):
            products[name] = weight.rounded(option)
            bias = weight.bias_beside(products[name])
            biases |= {} if bias is None else {name: bias}
        integers = {name: product.integers for name, product in products.items()}
        return RoundedBlock(integers, {name: product.originals for name, product in products.items()}, biases)

    def pack(block: RoundedBlock, name: str, weight: QuantizedWeight) -> FactoredMatrix:
        return weight.packed(block.rounded[name], block.biases.get(name))

    return RoundedFit(start), pack


def _layer(checkpoint: Checkpoint, group: WeightGroup, forms: Forms) -> ModuleWeights:
    """Return the options of the attention of one layer."""
    k, folded = group.index, cast(Projections, group.projections)
    statistics, weights = group.statistics, dict[str, QuantizedWeight]()
    float_bits = float_width(attention_tensors(checkpoint, k))
    for name in NAMES:
        weight, bias, mean = folded.weights[name], folded.biases.get(name), None
        reads = statistics.reads_of_projection(k, name, len(weight))
        if name != "o" and bias is not None:
            # a change of the mean output goes into the bias, so that only the covariance of the inputs counts
            of_inputs = statistics.reads[f"{k}.x"]
            count, sums = of_inputs[-1, -1], of_inputs[:-1, -1]
            mean, reads = sums / count, reads - np.outer(sums, sums) / count
        (scale,) = statistics.scales[f"{k}.{name}"]
        stored = StoredBias(0 if bias is None else float_bits * bias.size, bias, mean)
        metric = Metric(reads, statistics.slopes[f"{k}.{name}"], float(scale))
        weights[name] = QuantizedWeight(weight, metric, of=name, bias=stored, forms=forms)
    return ModuleWeights(weights)


def _matrix(checkpoint: Checkpoint, group: WeightGroup, name: str, forms: Forms) -> ModuleWeights:
    """Return the options of a matrix outside the attention; its bias stays as it is."""
    wiring, (weight, n_bias) = checkpoint.wiring, group.weights[name]
    metric = _metric(wiring, name, weight, group.statistics)
    bias = checkpoint.folder.tensors.get(wiring.matrices[name].bias or "")
    stored = StoredBias(0 if bias is None else 8 * (bias.end - bias.begin))
    quantized = QuantizedWeight(weight, metric, bias=stored, by_row=wiring.is_embedding(name), forms=forms)
    return ModuleWeights({"": quantized}, n_bias)


def _metric(wiring: Wiring, name: str, weight: Array, statistics: Statistics) -> Metric:
    """Return the moments of rows and columns of a matrix, and the loss of the output in them.

    Rounding errors E of tables are white in the metric, as those of other weights are, and terms of different tokens
    are independent. With N tokens, the sum e of |p|^2 over logits and a vocabulary V, losses are

        look-ups      sum_t (E_t p_t)^2           =  tr(P E^T diag(n) E) / N
        predictions   sum_t |x_t E|^2 |p_t|^2 / V  =  tr(E^T A E) e / (N V)

    and for a table with both uses, whose metric B is a compromise, tr(B E^T E) (tr(B^-1 P) + tr(B^-1 A) e / N) / (V d).
    """
    reads, slopes, uses = statistics.reads, statistics.slopes, statistics.scales[name]
    if len(uses) == 1:
        return Metric(reads[name], slopes[name], float(uses[0]))
    energy, n_tokens, n_texts = uses.tolist()
    if wiring.is_unembedding(name):  # the gradients of the logits are as wide as the vocabulary
        return Metric(reads[name], None, energy / n_tokens / weight.shape[1] / n_texts)
    if wiring.tied_key is None:
        return Metric(reads[name], slopes[name], 1 / n_tokens / n_texts)
    looked_up = moments_of_rows(weight, reads[name])
    predicts = slopes[wiring.tied_key], reads[wiring.tied_key]
    nearest = nearest_kronecker_product([(looked_up, slopes[name]), predicts])[1]
    energy = float(statistics.scales[wiring.tied_key][0])
    both = np.linalg.solve(damped(nearest, _NEGLIGIBLE), slopes[name] + energy / n_tokens * reads[wiring.tied_key])
    return Metric(None, nearest, float(np.trace(both)) / weight.size / n_texts)
