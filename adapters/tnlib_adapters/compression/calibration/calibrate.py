"""Calibrated factorisation of all layers: statistics of a text, rank selection, block-wise reconstruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.statistics import (
    Spill,
    Statistics,
    StatisticsFiles,
    block_key,
    collect,
    origin_of,
)
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
from tnlib_adapters.factors.projections import Products, Projections, put_together, take_apart

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.stored_weights import Change, Group

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
    spill: Spill | None = None,
) -> Calibration:
    """Return the calibration statistics and components of the weights that `what` selects.

    Parameters
    ----------
    checkpoint, model
        The model on disk, and running.
    batches
        Batches of the calibration text.
    progress
        Called as progress(stage, done, total).
    what
        Compressed part; there are no layers for "mlp" and for attention on latent vectors.
    file
        Statistics file, or None.
    spill
        Folder for what is between blocks, from which an interrupted collection is resumed; None for a temporary one.
    """
    from tnlib_adapters.instrument.weight_inputs import find_places

    check_tokens(model.function, batches, widest_input(checkpoint, what))
    names, sample = names_of(checkpoint, what, with_text=True), sample_batches(batches, _TOKENS_OF_STATISTICS)
    keys = not has_rotary_or_norms(checkpoint)
    # moments must be those of the inputs of the folded weights
    model = model.changed(fold_biases_of(model, keys=keys)) if checkpoint.wiring.projection_layers(what) else model
    places = find_places(model, names, attention=bool(checkpoint.wiring.projection_layers(what)))
    groups = {name: place.group for name, place in places.items()}
    folded: dict[int, Projections] = {}
    layers: dict[int, CalibratedLayer] = {}
    matrices: dict[str, Matrix] = {}

    def components(group: int, moments: Statistics) -> dict[str, Components]:
        if group in checkpoint.wiring.projection_layers(what):
            folded[group] = fold_biases(checkpoint.projections(group), checkpoint.sizes, keys=keys)
            layers[group] = CalibratedLayer(folded[group], moments.of_layer(group))
        own = [name for name in names if groups[name] == group]
        matrices.update({name: read_matrix(checkpoint, name, moments.reads, moments.slopes) for name in own})
        return components_of({k: layer for k, layer in layers.items() if k == group}, [matrices[n] for n in own])

    if spill is None:
        statistics = collect(model, places, sample, progress, components=components)
    else:
        origin = origin_of(checkpoint, sample, places, model.longest)
        files = StatisticsFiles(spill, origin, file)
        is_complete = files.is_complete()
        spill.claim(origin)
        if not is_complete:
            streams, save, done = streams_of_fit(model, batches, spill), files.save, files.done()
            collect(model, places, sample, progress, components=components, streams=streams, save=save, done=done)
            files.join()
        statistics = files.statistics()
    for group in {place.group for place in places.values()}:
        if group not in layers and not any(groups[name] == group for name in matrices):  # collected before
            components(group, statistics)
    in_order = [layers[k] for k in sorted(layers)]
    return Calibration(
        tuple(folded[k] for k in sorted(folded)), in_order, [matrices[n] for n in names], statistics, statistics.gates
    )


def metric_of(statistics: Statistics) -> Callable[[int], Array]:
    """Return the function from a block to the second moments of the gradients at its output."""
    return lambda k: statistics.slopes[block_key(k)]


def streams_of_fit(model: RunningModel, batches: Sequence[Batch], spill: Spill) -> Streams:
    """Return the streams of the batches of the fit, of which those of the statistics are the first."""
    from tnlib_adapters.instrument.block_passes import Streams

    return Streams(spill.folder, sample_batches(batches, _TOKENS_OF_FIT), model.sizes.d_model)


def fold_biases_of(model: RunningModel, *, keys: bool) -> Change:
    """Return the change of the weights of a model by `fold_biases`, which no output notices."""
    import torch

    layers = model.wiring.layers

    def change(group: int, values: Group) -> Group:
        if not 0 <= group < len(layers) or layers[group].attention.latent is not None:
            return values
        attention = layers[group].attention
        projections = take_apart(attention, lambda name: values[name].numpy() if name in values else None)
        folded = put_together(attention, fold_biases(projections, model.sizes, keys=keys))
        return values | {name: torch.from_numpy(array) for name, array in folded.items() if array.ndim == 1}

    return change


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


def components_of(layers: Mapping[int, CalibratedLayer], matrices: Sequence[Matrix] = ()) -> dict[str, Components]:
    """Return the components of all weights by their keys in a running model; layers by their index."""
    components = {
        f"{k}.{name}": weight_components
        for k, layer in layers.items()
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
    folder: Path | None = None,
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
    folder
        Folder for what is between blocks, from which an interrupted run is resumed; None for a temporary one.
    source
        The running model of `checkpoint`; None loads it.

    Raises
    ------
    ArgumentError
        If the text is too short, or the statistics file belongs to another model, text or choice of weights.
    """
    model = (source or SourceModel(checkpoint)).original
    batches, spill = model.batches(text), Spill(folder)
    calibration = collect_calibration(checkpoint, model, batches, progress, what=what, file=file, spill=spill)
    layers, matrices = weighed_parts(calibration)
    moments = calibration.statistics.reads

    def fit(options: Sequence[Sequence[int]]) -> list[list[FactoredMatrix]]:
        metric = metric_of(calibration.statistics)
        return fit_factors(
            model, layers, matrices, options, streams_of_fit(model, batches, spill), metric=metric, progress=progress
        )

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
    streams: Streams,
    n_steps: int | None = None,
    *,
    metric: Callable[[int], Array] | None = None,
    progress: Progress = quiet,
) -> list[list[FactoredMatrix]]:
    """Return the factors of every layer and matrix after the fit; see `fit_layers` for `streams` and `metric`."""
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

    n_steps = _STEPS if n_steps is None else n_steps
    fitted_layers = list(
        fit_layers(model, streams, start, metric=metric, tables=tables, n_steps=n_steps, progress=progress)
    )
    for products in fitted_layers:
        factors |= {name: products.factors[name] for name in products.modules()}
    packed = [layer.packed(products) for layer, products in zip(layers, fitted_layers, strict=bool(layers))]
    return packed + [matrix.packed(factors[matrix.name]) for matrix in matrices]
