"""Calibrated factorisation of all layers: statistics of a text, rank selection, block-wise reconstruction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.statistics import Statistics, collect, forget, measure_gates
from tnlib_adapters.compression.calibration.statistics_file import resume
from tnlib_adapters.compression.calibration.text import check_tokens, some_of
from tnlib_adapters.compression.evaluation.error_measures import measure_of_text
from tnlib_adapters.compression.methods.calibrated import CalibratedLayer, UntouchedLayer, fold_biases
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.factorisation import Factorisation
from tnlib_adapters.compression.methods.other_matrices import Matrix, names_of, read_matrix, widest_input
from tnlib_adapters.compression.methods.uncalibrated import turns
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.sizes import count_attention
from tnlib_adapters.factors.attention_factors import Piece
from tnlib_adapters.factors.module_factors import is_embedding, mlp_names, multiply_out
from tnlib_adapters.factors.products import Products

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch, RunningModel

# Moments and gates converge with few tokens; the fit has as many unknowns as a layer.
_TOKENS_OF_STATISTICS = 32_768
_TOKENS_OF_FIT = 65_536
_STEPS = 400  # optimizer steps per layer


Layers = Sequence[CalibratedLayer | UntouchedLayer]


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

    Parameters
    ----------
    checkpoint, model
        The same model twice: its weights, and running. The running model's biases change, its outputs do not.
    batches
        Batches of the calibration text.
    progress
        Called as progress(stage, done, total).
    what
        Compressed part; there are no layers for "mlp".
    file
        Statistics file, or None.
    """
    from tnlib_adapters.instrument.block_replacement import install
    from tnlib_adapters.instrument.weight_inputs import find_places

    check_tokens(batches, widest_input(checkpoint, what))
    turned, folded = turns(checkpoint), []
    for k in range(0 if what == "mlp" else checkpoint.n_layers):
        folded.append(fold_biases(checkpoint.projections(k), checkpoint.sizes, keys=not turned))
        install(model, k, folded[-1])  # moments must be those of the inputs of the folded weights
    names, sample = names_of(checkpoint, what), some_of(batches, _TOKENS_OF_STATISTICS)
    places = find_places(model, names, attention=bool(folded))
    so_far, save = (Statistics(), forget) if file is None else resume(file, checkpoint, sample, places)
    statistics = collect(model, places, sample, so_far, progress, save=save)
    layers, matrices, total = [], list[Matrix](), len(folded) + len(names)
    for k, weights in enumerate(folded):
        progress("factorising", k, total)
        layers.append(CalibratedLayer(weights, statistics.of_layer(k)))
    for done, name in enumerate(names):
        progress("factorising", len(folded) + done, total)
        matrices.append(read_matrix(checkpoint, name, statistics.reads[name], statistics.slopes[name], fitted=True))
    progress("factorising", total, total)
    gates = measure_gates(model, places, sample, components_of(layers, matrices), statistics, progress, save=save)
    for k, layer in enumerate(layers):
        layer.weigh({name: gates[f"{k}.{name}"] for name in layer.components})
    for matrix in matrices:
        matrix.weigh(gates[matrix.name])
    return layers, matrices


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
) -> Factorisation:
    """Factorise `what` of every layer by the statistics of a text; the chosen factors are fitted on it.

    Raises
    ------
    ArgumentError
        If the text is too short, or the statistics file belongs to another model, text or choice of weights.
    """
    from tnlib_adapters.instrument.running_model import open_running

    model = open_running(checkpoint.folder.path)
    batches = model.batches(text)
    calibrated, matrices = calibrated_parts(checkpoint, model, batches, progress, what=what, file=file)
    layers: Layers = calibrated or [UntouchedLayer() for _ in range(checkpoint.n_layers)]

    def fit(options: Sequence[Sequence[int]]) -> list[list[Piece]]:
        fresh = open_running(checkpoint.folder.path)  # the fit modifies the running model
        return fitted(fresh, layers, matrices, options, batches, progress=progress)

    n_before = 0 if what == "mlp" else sum(count_attention(checkpoint))
    n_before += sum(matrix.n_before for matrix in matrices)
    return Factorisation("calibrated", layers, n_before, measure_of_text(checkpoint), modules=matrices, fit=fit)


def fitted(
    model: RunningModel,
    layers: Layers,
    matrices: Sequence[Matrix],
    options: Sequence[Sequence[int]],
    batches: Sequence[Batch],
    n_steps: int | None = None,
    progress: Progress = quiet,
) -> list[list[Piece]]:
    """Return the pieces of every layer and matrix after the fit, which leaves the running model truncated."""
    from tnlib_adapters.instrument.layer_fit import fit_layers

    row, n = model.row, len(layers)
    factors = {matrix.name: matrix.factors(choice) for matrix, choice in zip(matrices, options[n:], strict=True)}
    tables = {
        name: multiply_out(matrix_factors, ())
        for name, matrix_factors in factors.items()
        if is_embedding(row, name) and matrix_factors
    }

    def start(k: int) -> Products:
        inside = {name: factors[name] for name in mlp_names(row, [k]) if factors.get(name)}
        return layers[k].products(options[k]).beside(inside)

    sample, n_steps = some_of(batches, _TOKENS_OF_FIT), _STEPS if n_steps is None else n_steps
    layer_pieces = list(fit_layers(model, sample, start, tables=tables, n_steps=n_steps, progress=progress))
    for products in layer_pieces:
        factors |= {name: products.factors[name] for name in products.modules()}
    pieces = [layer.packed(products) for layer, products in zip(layers, layer_pieces, strict=True)]
    return pieces + [matrix.packed(factors[matrix.name]) for matrix in matrices]
