"""Calibrated factorisation of all layers: statistics of a text, rank selection, block-wise reconstruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.statistics import Statistics, collect, measure_gates, no_save, resume
from tnlib_adapters.compression.calibration.text import check_tokens, sample_batches
from tnlib_adapters.compression.methods.calibrated import CalibratedLayer, fold_biases
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised, measure_of_text
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.other_matrices import Matrix, names_of, read_matrix, widest_input
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.compression.sizes import count_attention
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Products, Projections

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch, RunningModel

# Moments and gates converge with few tokens; the fit has as many unknowns as a layer.
_TOKENS_OF_STATISTICS = 32_768
_TOKENS_OF_FIT = 65_536
_STEPS = 400  # optimizer steps per layer
# Losses of unembeddings count twice: the fit of a layer halves its loss (built-in Llama: 0.38 to 0.19 and 0.053 to
# 0.026 nats a token), and unembeddings are not fitted
_NOT_FITTED = 2


@dataclass(frozen=True)
class Calibration:
    """Calibration statistics of the weights of a model, and their components.

    Parameters
    ----------
    projections
        Of every attention layer, with biases folded; () where they are not compressed.
    layers, matrices
        Components of these projections and of the other matrices, by their squared singular values.
    statistics
        Moments of inputs and of output gradients.
    gates
        Losses of the components by weight keys.
    """

    projections: tuple[Projections, ...]
    layers: list[CalibratedLayer]
    matrices: list[Matrix]
    statistics: Statistics
    gates: Mapping[str, Array]


def collect_calibration(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
) -> Calibration:
    """Return the calibration statistics and components of the weights that `what` selects.

    Parameters
    ----------
    checkpoint, model
        The model on disk, and running. The biases of the running model are changed, its outputs are not.
    batches
        Batches of the calibration text.
    progress
        Called as progress(stage, done, total).
    what
        Compressed part; there are no layers for "mlp" and for attention on latent vectors.
    file
        Statistics file, or None.
    """
    from tnlib_adapters.instrument.layer_fit import install
    from tnlib_adapters.instrument.weight_inputs import find_places

    check_tokens(model.function, batches, widest_input(checkpoint, what))
    rotary, folded = has_rotary_or_norms(checkpoint), []
    for k in checkpoint.wiring.projection_layers(what):
        folded.append(fold_biases(checkpoint.projections(k), checkpoint.sizes, keys=not rotary))
        install(model, k, folded[-1])  # moments must be those of the inputs of the folded weights
    names, sample = names_of(checkpoint, what, with_text=True), sample_batches(batches, _TOKENS_OF_STATISTICS)
    places = find_places(model, names, attention=bool(folded))
    so_far, save = (Statistics(), no_save) if file is None else resume(file, checkpoint, sample, places, model.longest)
    statistics = collect(model, places, sample, so_far, progress, save=save)
    layers, matrices, total = [], list[Matrix](), len(folded) + len(names)
    for k, weights in enumerate(folded):
        progress("factorising", k, total)
        layers.append(CalibratedLayer(weights, statistics.of_layer(k)))
    for done, name in enumerate(names):
        progress("factorising", len(folded) + done, total)
        matrices.append(read_matrix(checkpoint, name, statistics.reads, statistics.slopes))
    progress("factorising", total, total)
    gates = measure_gates(model, places, sample, components_of(layers, matrices), statistics, progress, save=save)
    return Calibration(tuple(folded), layers, matrices, statistics, gates)


def calibrated_parts(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
) -> tuple[list[CalibratedLayer], list[Matrix]]:
    """Return the attention layers and other matrices with components ordered by their effect on the model output.

    Parameters are those of `collect_calibration`.
    """
    return weighed_parts(collect_calibration(checkpoint, model, batches, progress, what=what, file=file))


def weighed_parts(calibration: Calibration) -> tuple[list[CalibratedLayer], list[Matrix]]:
    """Replace the squared singular values of all components by their losses, and return layers and matrices."""
    for k, layer in enumerate(calibration.layers):
        layer.weigh({name: calibration.gates[f"{k}.{name}"] for name in layer.components})
    for matrix in calibration.matrices:
        matrix.weigh(calibration.gates[matrix.name])
    return calibration.layers, calibration.matrices


def components_of(layers: Sequence[CalibratedLayer], matrices: Sequence[Matrix] = ()) -> dict[str, Components]:
    """Return the components of all weights by their keys in a running model."""
    components = {
        f"{k}.{name}": weight_components
        for k, layer in enumerate(layers)
        for name, weight_components in layer.components.items()
    }
    return components | {weight_components.name: weight_components.components for weight_components in matrices}


def factorise_calibrated(
    checkpoint: Checkpoint,
    text: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
    source: SourceModel | None = None,
) -> Factorisation:
    """Factorise `what` of every layer by the statistics of a text; the chosen factors are fitted on it.

    Parameters
    ----------
    checkpoint
        Not compressed.
    text
        Calibration text.
    progress
        Called as progress(stage, done, total).
    what
        "attention", "mlp" or "all".
    file
        Statistics file, or None.
    source
        The running model of `checkpoint`; None loads it.

    Raises
    ------
    ArgumentError
        If the text is too short, or the statistics file belongs to another model, text or choice of weights.
    """
    running = source or SourceModel(checkpoint)
    batches = running.original.batches(text)
    calibration = collect_calibration(checkpoint, running.copy(), batches, progress, what=what, file=file)
    layers, matrices = weighed_parts(calibration)
    moments = calibration.statistics.reads

    def fit(options: Sequence[Sequence[int]]) -> list[list[FactoredMatrix]]:
        return fit_factors(running.copy(), layers, matrices, options, batches, progress=progress)

    n_before = sum(count_attention(checkpoint)) if layers else 0
    n_before += sum(matrix.n_before for matrix in matrices)
    modules = checkpoint.wiring.attention_modules
    parts: dict[str, Factorised] = dict(zip(modules, layers, strict=False))  # no layers where they are not compressed
    parts |= {matrix.name: matrix for matrix in matrices}
    wiring = checkpoint.wiring
    predict = [m.name for m in matrices if wiring.is_unembedding(m.name) or wiring.is_tied(m.name)]
    weights = dict.fromkeys(predict, _NOT_FITTED)
    measure = measure_of_text(checkpoint)
    return Factorisation("calibrated", parts, n_before, measure, fit=fit, weights=weights, moments=moments)


def fit_factors(
    model: RunningModel,
    layers: Sequence[CalibratedLayer],
    matrices: Sequence[Matrix],
    options: Sequence[Sequence[int]],
    batches: Sequence[Batch],
    n_steps: int | None = None,
    progress: Progress = quiet,
) -> list[list[FactoredMatrix]]:
    """Return the factors of every layer and matrix after the fit, which truncates the weights of `model`."""
    from tnlib_adapters.instrument.layer_fit import fit_layers

    wiring, n = model.wiring, len(layers)
    factors = {matrix.name: matrix.factors(choice) for matrix, choice in zip(matrices, options[n:], strict=True)}
    tables = {
        name: np.linalg.multi_dot([a.astype(np.float64) for a in matrix_factors])
        for name, matrix_factors in factors.items()
        if wiring.is_embedding(name) and matrix_factors
    }

    def start(k: int) -> Products:
        layer = wiring.layers[k]
        names = [matrix.name for matrix in (*layer.latent_matrices, *layer.feed_forward_matrices)]
        inside = {name: factors[name] for name in names if factors.get(name)}
        return (layers[k].products(options[k]) if layers else Products({})).beside(inside)

    sample, n_steps = sample_batches(batches, _TOKENS_OF_FIT), _STEPS if n_steps is None else n_steps
    fitted_layers = list(fit_layers(model, sample, start, tables=tables, n_steps=n_steps, progress=progress))
    for products in fitted_layers:
        factors |= {name: products.factors[name] for name in products.modules()}
    packed = [layer.packed(products) for layer, products in zip(layers, fitted_layers, strict=bool(layers))]
    return packed + [matrix.packed(factors[matrix.name]) for matrix in matrices]
