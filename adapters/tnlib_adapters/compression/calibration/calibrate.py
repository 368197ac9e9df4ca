"""Calibrated factorisation of all layers: statistics of a text, rank selection, block-wise reconstruction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.selected_weights import GroupCalibration
from tnlib_adapters.compression.activation_statistics.statistics_files import Spill
from tnlib_adapters.compression.calibration.collect_calibration import collect_calibration, streams_of_fit
from tnlib_adapters.compression.calibration.fit_by_block import PASSES, by_block, saved, steps_of_model
from tnlib_adapters.compression.calibration.fitted_files import Fitted, FittedFiles
from tnlib_adapters.compression.methods.calibrated import CalibratedLayer
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised, measure_of_text
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredArrays, Workspace
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.sizes import count_compressed
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Products

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import RunningModel

# Losses of unembeddings count twice: the fit of a layer halves its loss (built-in Llama: 0.38 to 0.19 and 0.053 to
# 0.026 nats a token), and unembeddings are not fitted
_NOT_FITTED = 2


def weighed_parts(_: Checkpoint, group: GroupCalibration) -> dict[str, Factorised]:
    """Replace the squared singular values of all components of a group by their losses; return layer and matrices."""
    gates, parts = group.statistics.gates, dict[str, Factorised]()
    if group.layer is not None:
        group.layer.weigh({name: gates[f"{group.index}.{name}"] for name in group.layer.components})
        parts[group.module] = group.layer
    for name, matrix in group.matrices.items():
        matrix.weigh(gates[name])
        parts[name] = matrix
    return parts


def factorise_calibrated(
    source: SourceModel, text: str, request: Request, workspace: Workspace | None = None
) -> Factorisation:
    """Factorise the weights of a request by the statistics of a text; the chosen factors are fitted on it.

    Parameters
    ----------
    source
        The checkpoint, not compressed, and its running model.
    text
        Calibration text.
    request
        Compressed part, statistics file, folder of an interrupted run, effort and progress; there is no fit with
        effort "low".
    workspace
        Memory and temporary files of the factors.

    Raises
    ------
    ArgumentError
        If the text is too short, or the statistics file belongs to another model, text or choice of weights.
    """
    checkpoint, model, wiring = source.checkpoint, source.original, source.checkpoint.wiring
    batches, spill = model.batches(text), Spill(request.partial_folder)
    parts = collect_calibration(checkpoint, model, batches, weighed_parts, request, spill=spill, workspace=workspace)

    def fit(options: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, list[FactoredMatrix]]]:
        streams = streams_of_fit(model, batches, spill)
        n_steps = steps_of_model(model, streams, request.effort)
        return fit_factors(model, parts, options, streams, n_steps, progress=request.run.progress)

    names = names_of(checkpoint, request.what, with_text=True)
    predict = [name for name in names if wiring.is_unembedding(name) or wiring.is_tied(name)]
    return Factorisation(
        "calibrated",
        parts,
        count_compressed(checkpoint, request.what, with_text=True),
        measure_of_text(checkpoint),
        fit=fit if PASSES[request.effort] else None,
        weights=dict.fromkeys(predict, _NOT_FITTED) if PASSES[request.effort] else {},
    )


def fit_factors(
    model: RunningModel,
    parts: Mapping[str, LazyPart],
    options: Mapping[str, Sequence[int]],
    streams: Streams,
    n_steps: int,
    *,
    progress: Progress = quiet,
) -> Iterator[tuple[str, list[FactoredMatrix]]]:
    """Yield the factors of every layer and matrix after the block-wise reconstruction.

    Parameters
    ----------
    model
        The original.
    parts
        Calibrated layers and matrices by module.
    options
        Their chosen sizes.
    streams
        As in `fit_layers`. The factors of blocks that are done are in their folder, and are not fitted again.
    n_steps
        Optimizer steps per layer.
    progress
        Called as progress(stage, done, total).
    """
    from tnlib_adapters.instrument.layer_fit import FitSteps, fit_layers

    inside, outside = by_block(model.wiring, parts)
    tables = StoredArrays(Workspace(0, lambda: streams.folder))

    def truncated(name: str) -> tuple[str, list[FactoredMatrix]]:
        part = parts[name].load()
        factors = part.factors(options[name])
        if factors and model.wiring.is_embedding(name):
            tables.add({name: np.linalg.multi_dot([a.astype(np.float64) for a in factors]).astype(np.float32)})
        return name, part.packed(factors)

    yield from map(truncated, outside)

    def start(k: int) -> Products:
        products, factors = Products({}), dict[str, tuple[Array, ...]]()
        for name in inside[k]:
            part = parts[name].load()
            if isinstance(part, CalibratedLayer):
                products = part.products(options[name])
            elif own := part.factors(options[name]):
                factors[name] = own
        return products.beside(factors)

    def packed(k: int, products: Products) -> Fitted:
        loaded = ((name, parts[name].load()) for name in inside[k])
        return [
            (name, part.packed(products if isinstance(part, CalibratedLayer) else products.factors.get(name, ())))
            for name, part in loaded
        ]

    def fitted(first: int) -> Iterator[Fitted]:
        steps = FitSteps(n_steps)
        fit = fit_layers(model, streams, start, tables=tables, steps=steps, first=first, progress=progress)
        return map(packed, count(first), fit)

    yield from saved(FittedFiles(streams, model.wiring.attention_modules, "calibrated", options, n_steps), fitted)
