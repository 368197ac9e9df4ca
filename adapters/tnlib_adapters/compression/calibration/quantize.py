"""Calibrated rounding of all layers: moments of a text, bit allocation, rounding, and block-wise reconstruction."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.statistics import GroupFactorisation, ReadWeight, Statistics, WeightGroup
from tnlib_adapters.compression.compressed_part import compressed_weights
from tnlib_adapters.compression.engine_layouts import ENGINES, GGUF
from tnlib_adapters.compression.methods.components import damped, moments_of_rows, nearest_kronecker_product
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.methods.quantized import Forms, Metric, QuantizedWeight, StoredBias
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences
from tnlib_adapters.factors import UNEMBEDDING
from tnlib_adapters.factors.model_weights import (
    ModelWeight,
    biases_of,
    count_parameters,
    float_width,
    n_bytes,
    tensors_of,
)

_LEAST_WHOLE = 2.5  # bits per parameter from which effort low does not try products of two factors, which takes time
_NEGLIGIBLE = 1e-6  # of the mean moment, added before an inverse is applied


def factorise_quantized(
    source: SourceModel, text: TokenSequences, request: Request, workspace: Workspace | None = None
) -> Factorisation:
    """Round the weights of a request, see `factorise_and_fit`; costs are bits."""
    from tnlib_adapters.compression.calibration.factorise_and_fit import factorise_and_fit

    factorise = GroupFactorisation(partial(_rounded_parts, forms_of(request)))
    return factorise_and_fit(source, text, request, workspace, factorise)


def forms_of(request: Request) -> Forms:
    """Return the forms of weights that are options for a request."""
    budget = request.budget
    if request.layout in ENGINES:
        engine = ENGINES[request.layout]
        widths, groups = (*(engine.super_bits or engine.bits),), engine.groups
        if budget.width is not None:
            widths, groups = (budget.width,), tuple(group for group in groups if group)
        in_blocks = request.layout == GGUF
        return Forms(False, widths=widths, groups=groups, has_zero=True, in_blocks=in_blocks, fused=engine.fuses)
    if budget.width is not None:
        return Forms(factors=False, widths=(budget.width,), groups=(0,))
    few = budget.bits is not None and budget.bits < _LEAST_WHOLE
    factors = request.effort != "low" or few or budget.keep is not None or budget.max_error is not None
    return Forms(factors, budget.keep is not None)


def check_bits(request: Request, checkpoint: Checkpoint) -> None:
    """Raise if the smallest forms of all weights, with their biases, take more than the bits of a budget."""
    bits, forms = request.budget.bits, forms_of(request)
    if bits is None or not request.in_bits:
        return
    weights = compressed_weights(checkpoint, request.what, with_text=True)
    fewest = sum(forms.fewest_bits(own.shape, by_row=own.is_table) for own in weights)
    fewest += 8 * n_bytes(biases_of(weights).values())
    n_parameters = count_parameters(weights)
    if fewest > math.floor(bits * n_parameters):
        least = math.ceil(100 * fewest / n_parameters) / 100
        raise ArgumentError(
            f"compress: bits must be at least {least:g} for layout {request.layout!r} on this model, whose smallest "
            f"integers, with scales and biases, take {fewest / 8e6:.2f} MB, got {bits:g}; raise it."
        )


def _rounded_parts(forms: Forms, group: WeightGroup) -> dict[str, Factorised]:
    weights, fused = [_rounded_weight(read, group, forms) for read in group.weights], dict[str, list[QuantizedWeight]]()
    for read, weight in zip(group.weights, weights, strict=True):
        fused.setdefault(read.weight.fused, []).append(weight)
    for name, (first, *others) in fused.items():  # queries, keys and values; gate and up
        if name and forms.fused:
            first.fuse(others, name)
    return group.by_module(weights)


def _rounded_weight(read: ReadWeight, group: WeightGroup, forms: Forms) -> QuantizedWeight:
    """Return the options of a weight; the bias of one that is no projection stays as it is."""
    weight, bias, mean = read.weight, read.bias, None
    metric = _metric(weight, read.values, group.statistics)
    if bias is not None and weight.of != "o":
        # a change of the mean output goes into the bias, so that only the covariance of the inputs counts
        of_inputs = group.statistics.reads[weight.reads]
        count, sums = of_inputs[-1, -1], of_inputs[:-1, -1]
        mean, metric = sums / count, metric._replace(reads=metric.reads - np.outer(sums, sums) / count)
    n_bits = 0 if weight.bias is None else 8 * n_bytes([weight.bias])
    if bias is not None:  # written in the widest dtype of its module
        n_bits = bias.size * float_width(tensors_of(own for own, *_ in group.weights if own.of).values())
    stored = StoredBias(n_bits, bias, mean)
    return QuantizedWeight(read.values, metric, of=weight.of, bias=stored, by_row=weight.is_table, forms=forms)


def _metric(weight: ModelWeight, values: Array, statistics: Statistics) -> Metric:
    """Return the moments of rows and columns of a weight, and the loss of the output in them.

    Rounding errors E of tables are white in the metric, as those of other weights are, and terms of different tokens
    are independent. With N tokens, the sum e of |p|^2 over logits and a vocabulary V, losses are

        look-ups      sum_t (E_t p_t)^2           =  tr(P E^T diag(n) E) / N
        predictions   sum_t |x_t E|^2 |p_t|^2 / V  =  tr(E^T A E) e / (N V)

    and for a table with both uses, whose metric B is a compromise, tr(B E^T E) (tr(B^-1 P) + tr(B^-1 A) e / N) / (V d).
    """
    reads, slopes = statistics.reads_of(weight, len(values)), statistics.slopes
    scales = statistics.scales[weight.key]
    if len(scales) == 1:
        return Metric(reads, slopes[weight.key], float(scales[0]))
    energy, n_tokens, n_texts = scales.tolist()
    if weight.role == UNEMBEDDING:  # the gradients of the logits are as wide as the vocabulary
        return Metric(reads, None, energy / n_tokens / values.shape[1] / n_texts)
    if weight.tied_key is None:
        return Metric(reads, slopes[weight.key], 1 / n_tokens / n_texts)
    looked_up, inputs = moments_of_rows(values, reads), statistics.reads[weight.tied_key]
    predicts = slopes[weight.tied_key], inputs
    nearest = nearest_kronecker_product([(looked_up, slopes[weight.key]), predicts])[1]
    energy = float(statistics.scales[weight.tied_key][0])
    both = np.linalg.solve(damped(nearest, _NEGLIGIBLE), slopes[weight.key] + energy / n_tokens * inputs)
    return Metric(None, nearest, float(np.trace(both)) / values.size / n_texts)
