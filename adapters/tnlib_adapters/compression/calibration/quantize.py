"""Calibrated rounding of all layers: moments of a text, bit allocation, rounding, and block-wise reconstruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.calibrate import Calibration, collect_calibration, metric_of, streams_of_fit
from tnlib_adapters.compression.calibration.statistics import Spill
from tnlib_adapters.compression.methods.calibrated import with_bias_row
from tnlib_adapters.compression.methods.compensated_rounding import rounding_loss
from tnlib_adapters.compression.methods.components import Components, multiply_rows, nearest_kronecker_product
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised, measure_of_text
from tnlib_adapters.compression.methods.other_matrices import read_weight
from tnlib_adapters.compression.methods.quantized import QuantizedLayer, QuantizedMatrix, QuantizedWeight
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.compression.sizes import attention_tensors, count_attention, float_width
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import NAMES

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.rounded_fit import RoundedBlock
    from tnlib_adapters.instrument.running_model import RunningModel

_STEPS = 200  # optimizer steps per layer
_NEGLIGIBLE = 1e-8  # squared singular values below this share of the largest have losses of rounding errors


def factorise_quantized(
    checkpoint: Checkpoint,
    text: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
    folder: Path | None = None,
    source: SourceModel | None = None,
    bits: int | None = None,
    fewer_numbers: bool = False,
) -> Factorisation:
    """Round `what` of every layer by the statistics of a text; costs are bits, and the chosen weights are fitted on it.

    Parameters and errors are those of `factorise_calibrated`. `bits` are those of every weight, None for all options;
    `fewer_numbers` adds options for a bound on the numbers.
    """
    model = (source or SourceModel(checkpoint)).original
    batches, spill = model.batches(text), Spill(folder)
    calibration = collect_calibration(checkpoint, model, batches, progress, what=what, file=file, spill=spill)
    forms = {"bits": bits, "fewer_numbers": fewer_numbers}
    layers = [_layer(checkpoint, calibration, k, forms) for k in range(len(calibration.layers))]
    matrices = [_matrix(checkpoint, calibration, matrix.name, forms) for matrix in calibration.matrices]
    parts: dict[str, Factorised] = dict(zip(checkpoint.wiring.attention_modules, layers, strict=False))
    parts |= {matrix.name: matrix for matrix in matrices}
    for done, part in enumerate(parts.values()):
        progress("rounding", done, len(parts))
        _ = part.curves
    progress("rounding", len(parts), len(parts))

    def fit(options: Sequence[Sequence[int]]) -> list[list[FactoredMatrix]]:
        metric = metric_of(calibration.statistics)
        return fit_rounded(
            model, layers, matrices, options, streams_of_fit(model, batches, spill), metric=metric, progress=progress
        )

    n_before = sum(count_attention(checkpoint)) if layers else 0
    n_before += sum(matrix.weight.weight.size + matrix.fixed for matrix in matrices)
    measure = measure_of_text(checkpoint)
    moments = calibration.statistics.reads
    return Factorisation("quantized", parts, n_before, measure, fit=fit, in_bits=True, moments=moments)


def fit_rounded(
    model: RunningModel,
    layers: Sequence[QuantizedLayer],
    matrices: Sequence[QuantizedMatrix],
    options: Sequence[Sequence[int]],
    streams: Streams,
    n_steps: int | None = None,
    *,
    metric: Callable[[int], Array] | None = None,
    progress: Progress = quiet,
) -> list[list[FactoredMatrix]]:
    """Return the rounded weights of every layer and matrix after the block-wise reconstruction.

    Parameters
    ----------
    model
        The original.
    layers, matrices
        Stored forms of the projections of every layer, () where they are not compressed, and of the other weights.
    options
        The chosen form of every weight, by layers and then by matrices.
    streams, metric
        As in `fit_layers`.
    n_steps
        Optimizer steps per layer; None for 200.
    progress
        Called as progress(stage, done, total).

    Returns
    -------
    list of list of FactoredMatrix
        One list for every layer and matrix, in this order.
    """
    from tnlib_adapters.instrument.rounded_fit import RoundedBlock, fit_rounded_layers

    wiring, n = model.wiring, len(layers)
    rounded = {matrix.name: matrix.weight.rounded(own[0]) for matrix, own in zip(matrices, options[n:], strict=True)}
    tables = {name: product.values() for name, product in rounded.items() if wiring.is_embedding(name)}

    def start(k: int) -> RoundedBlock:
        wired = wiring.layers[k]
        names = [matrix.name for matrix in (*wired.latent_matrices, *wired.feed_forward_matrices)]
        own = {name: rounded[name] for name in names if name in rounded}
        biases: Mapping[str, Array] = {}
        if layers:
            projections = layers[k].rounded(options[k])
            own, biases = {**projections, **own}, layers[k].biases(projections)
        integers = {name: product.integers for name, product in own.items()}
        return RoundedBlock(integers, {name: product.originals for name, product in own.items()}, biases)

    n_steps = _STEPS if n_steps is None else n_steps
    blocks = list(
        fit_rounded_layers(model, streams, start, metric=metric, tables=tables, n_steps=n_steps, progress=progress)
    )
    packed = []
    for layer, block in zip(layers, blocks, strict=bool(layers)):
        packed.append(layer.packed({name: block.rounded[name] for name in NAMES}, block.biases))
    final = {name: product.integers for name, product in rounded.items()}
    for block in blocks:
        final |= {name: integers for name, integers in block.rounded.items() if name not in NAMES}
    return packed + [matrix.packed(final[matrix.name]) for matrix in matrices]


def _layer(checkpoint: Checkpoint, calibration: Calibration, k: int, forms: Mapping[str, Any]) -> QuantizedLayer:
    """Return the options of the attention of one layer."""
    folded, moments = calibration.projections[k], calibration.statistics.of_layer(k)
    weights, means = {}, {}
    for name in NAMES:
        weight, slopes = folded.weights[name], moments.slopes[name]
        reads = moments.reads(name, len(weight))
        if name != "o" and name in folded.biases:
            # a change of the mean output goes into the bias, so that only the covariance of the inputs counts
            count, sums = moments.x[-1, -1], moments.x[:-1, -1]
            means[name] = sums / count
            reads = reads - np.outer(sums, sums) / count
        components, gates = calibration.layers[k].components[name], calibration.gates[f"{k}.{name}"]
        biased = with_bias_row(folded, name)  # the components are those of this matrix
        scale = _loss_per_error(components, gates, biased, moments.reads(name, len(biased)), slopes)
        weights[name] = QuantizedWeight(weight, reads, slopes, scale, **forms)
    return QuantizedLayer(weights, folded.biases, means, float_width(attention_tensors(checkpoint, k)))


def _matrix(checkpoint: Checkpoint, calibration: Calibration, name: str, forms: Mapping[str, Any]) -> QuantizedMatrix:
    """Return the options of a matrix outside the attention."""
    wiring, statistics = checkpoint.wiring, calibration.statistics
    weight, n_bias = read_weight(checkpoint, name)
    reads, slopes = statistics.reads[name], statistics.slopes[name]
    (components,) = (matrix.components for matrix in calibration.matrices if matrix.name == name)
    by_row = wiring.is_embedding(name)
    metric: tuple[Array | None, Array | None] = (reads, slopes)
    if wiring.is_unembedding(name):
        metric = (reads, None)  # the gradients of the logits are as wide as the vocabulary
    elif by_row and wiring.tied_key is not None:
        looked_up = weight.T.astype(np.float64) @ multiply_rows(reads, weight)
        predicts = statistics.slopes[wiring.tied_key], statistics.reads[wiring.tied_key]
        metric = (None, nearest_kronecker_product([(looked_up, slopes), predicts])[1])
    scale = _loss_per_error(components, calibration.gates[name], weight, *metric)
    quantized = QuantizedWeight(weight, *metric, scale, by_row=by_row, **forms)
    bias = checkpoint.folder.tensors.get(wiring.matrices[name].bias or "")
    return QuantizedMatrix(name, quantized, n_bias, 0 if bias is None else 8 * (bias.end - bias.begin))


def _loss_per_error(
    components: Components, gates: Array, weight: Array, reads: Array | None, slopes: Array | None
) -> float:
    """Return the mean loss per unit of `rounding_loss` in this metric, over the components of a weight.

    Moments alone treat the tokens of a text as independent; the gates do not. On MiniLM the factors of projections
    differ by up to 25.
    """
    squares = components.losses * rounding_loss(weight.astype(np.float64), reads, slopes)
    counted = squares > _NEGLIGIBLE * squares.max(initial=0.0)
    return float(np.mean(gates[counted] / squares[counted])) if counted.any() else 0.0
