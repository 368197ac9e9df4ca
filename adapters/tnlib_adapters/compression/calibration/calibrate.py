"""From a text to the factors of every layer: what it shows, what is cut, and the fit of what is left."""

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

# Moments and gates settle early; the fit has as many unknowns as a layer.
_TOKENS_OF_STATISTICS = 32_768
_TOKENS_OF_FIT = 65_536
_STEPS = 400  # of descent in every layer


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
    """Return the attention of every layer and the matrices around it, components as the text misses them.

    Parameters
    ----------
    checkpoint, model
        The same model twice, with its weights and running. What the running one computes stays, its biases do not.
    batches
        Of the text.
    progress
        Called with (stage, done, total).
    what
        Is compressed; there are no layers if that is "mlp".
    file
        Of statistics.
    """
    from tnlib_adapters.instrument.block_replacement import install
    from tnlib_adapters.instrument.weight_inputs import find_places

    check_tokens(batches, widest_input(checkpoint, what))
    turned, folded = turns(checkpoint), []
    for k in range(0 if what == "mlp" else checkpoint.n_layers):
        folded.append(fold_biases(checkpoint.projections(k), checkpoint.sizes, keys=not turned))
        install(model, k, folded[-1])  # moments are of what the folded weights read
    names, seen = names_of(checkpoint, what), some_of(batches, _TOKENS_OF_STATISTICS)
    places = find_places(model, names, attention=bool(folded))
    so_far, save = (Statistics(), forget) if file is None else resume(file, checkpoint, seen, places)
    found = collect(model, places, seen, so_far, progress, save=save)
    layers, matrices, total = [], list[Matrix](), len(folded) + len(names)
    for k, weights in enumerate(folded):
        progress("factorising", k, total)
        layers.append(CalibratedLayer(weights, found.of_layer(k)))
    for done, name in enumerate(names):
        progress("factorising", len(folded) + done, total)
        matrices.append(read_matrix(checkpoint, name, found.reads[name], found.slopes[name], fitted=True))
    progress("factorising", total, total)
    gates = measure_gates(model, places, seen, components_of(layers, matrices), found, progress, save=save)
    for k, layer in enumerate(layers):
        layer.weigh({name: gates[f"{k}.{name}"] for name in layer.components})
    for one in matrices:
        one.weigh(gates[one.name])
    return layers, matrices


def components_of(layers: Sequence[CalibratedLayer], matrices: Sequence[Matrix] = ()) -> dict[str, Components]:
    """Return the components of all weights by the keys that these have in a running model."""
    found = {f"{k}.{name}": one for k, layer in enumerate(layers) for name, one in layer.components.items()}
    return found | {one.name: one.components for one in matrices}


def factorise_calibrated(
    checkpoint: Checkpoint,
    text: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
) -> Factorisation:
    """Factorise `what` of every layer by what a text shows; what is chosen is fitted on it.

    Raises
    ------
    ArgumentError
        If the text is too short, or the statistics in the file are of something else.
    """
    from tnlib_adapters.instrument.running_model import open_running

    model = open_running(checkpoint.folder.path)
    batches = model.batches(text)
    found, matrices = calibrated_parts(checkpoint, model, batches, progress, what=what, file=file)
    layers: Layers = found or [UntouchedLayer() for _ in range(checkpoint.n_layers)]

    def fit(options: Sequence[Sequence[int]]) -> list[list[Piece]]:
        fresh = open_running(checkpoint.folder.path)  # the fit leaves it truncated
        return fitted(fresh, layers, matrices, options, batches, progress=progress)

    n_before = 0 if what == "mlp" else sum(count_attention(checkpoint))
    n_before += sum(one.n_before for one in matrices)
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
    """Return the pieces of every layer and every matrix after the fit, which leaves the running model truncated."""
    from tnlib_adapters.instrument.layer_fit import fit_layers

    row, n = model.row, len(layers)
    factors = {one.name: one.factors(own) for one, own in zip(matrices, options[n:], strict=True)}
    tables = {name: multiply_out(held, ()) for name, held in factors.items() if is_embedding(row, name) and held}

    def start(k: int) -> Products:
        inside = {name: factors[name] for name in mlp_names(row, [k]) if factors.get(name)}
        return layers[k].products(options[k]).beside(inside)

    seen, n_steps = some_of(batches, _TOKENS_OF_FIT), _STEPS if n_steps is None else n_steps
    found = list(fit_layers(model, seen, start, tables=tables, n_steps=n_steps, progress=progress))
    for products in found:
        factors |= {name: products.factors[name] for name in products.modules()}
    pieces = [layer.packed(products) for layer, products in zip(layers, found, strict=True)]
    return pieces + [one.packed(factors[one.name]) for one in matrices]
