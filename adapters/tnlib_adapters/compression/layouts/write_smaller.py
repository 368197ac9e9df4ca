"""Compress a checkpoint into a smaller model of an architecture that transformers knows, with a report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.compression.activation_statistics.statistics import collect
from tnlib_adapters.compression.activation_statistics.statistics_files import Spill
from tnlib_adapters.compression.calibration.collect_calibration import TOKENS_OF_STATISTICS, streams_of_fit
from tnlib_adapters.compression.calibration.fit_by_block import steps_of_model
from tnlib_adapters.compression.evaluation.evaluate import Reference
from tnlib_adapters.compression.layouts.layout_report import report_layout
from tnlib_adapters.compression.layouts.layout_request import LayoutRequest
from tnlib_adapters.compression.layouts.smaller_model import SmallerLayers, SmallerModel
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.compression.report.report import Report
from tnlib_adapters.compression.report.report_files import write_report
from tnlib_adapters.compression.request import PAGE, REPORT, Progress
from tnlib_adapters.compression.source_model import (
    SourceModel,
    check_finite,
    open_source,
    request_placement,
)
from tnlib_adapters.compression.text import check_tokens, sample_batches
from tnlib_adapters.compression.write import encode_in_range, lazy_entry
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.files.atomic_folder import check_target, scratch_folder, whole_folder
from tnlib_adapters.files.folder import write_folder
from tnlib_adapters.files.tensor_file import Entry, TensorInfo, widest_float


def write_smaller(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    request: LayoutRequest,
    *,
    force: bool,
    progress: Progress,
) -> Report:
    """Write a checkpoint as a smaller model, see `compress`; returns the report, which is also in the folder.

    Raises
    ------
    ArgumentError
        If the layout cannot hold the model, a size is none of it, or the text is too short.
    """
    started, target = time.perf_counter(), as_path("compress", "out", out)
    opened = open_source(request.source, source, target, force=force)
    checkpoint = opened.checkpoint
    smaller: SmallerModel[Any] = request.layout.resolve()(checkpoint, request)
    check_finite(list(checkpoint.folder.tensors.values()), progress)
    placement = request_placement(request.source)
    original = SourceModel(checkpoint, request.source.calibration_tokens, placement=placement)
    with scratch_folder(target) as scratch:
        workspace = Workspace(folder=scratch)
        layers = smaller.layers(workspace)
        tensors = [StoredArrays(workspace) for _ in range(checkpoint.n_layers)]
        for k, products in enumerate(_fitted(layers, original, opened.calibration or "", progress)):
            tensors[k].add({name: np.ascontiguousarray(a) for name, a in smaller.tensors(k, layers, products).items()})
        with whole_folder(target) as partial:
            entries = _entries(checkpoint, smaller, tensors)
            for done, total in write_folder(
                checkpoint.folder, entries, smaller.config(layers), partial, skip=(REPORT, PAGE)
            ):
                progress("writing tensors", done, total)
            written = open_checkpoint(partial)
            evaluation = Reference(original.original, opened.held_out).compare(original.open(written), progress)
            report = report_layout(checkpoint, written, smaller, request, evaluation, started)
            report = replace(report, calibration=opened.calibration_summary(original))
            write_report(report, partial)
            check_target("compress", target, checkpoint.folder.path, force=force)
    return report


def _fitted(layers: SmallerLayers, source: SourceModel, text: str, progress: Progress) -> Iterator[Products]:
    """Choose what the layers keep, and yield their weights, fitted on the text."""
    model = source.original
    batches, spill = model.batches(text), Spill()
    check_tokens("compress", batches, layers.widest_input)
    streams, sample = streams_of_fit(model, batches, spill), sample_batches(batches, TOKENS_OF_STATISTICS)
    places = layers.places(model)
    collect(model, places, sample, progress, components=layers.gated, streams=streams, save=layers.choose)
    yield from layers.fit(model, streams, steps_of_model(model, streams), progress)


def _entries(
    checkpoint: Checkpoint, smaller: SmallerModel[Any], layers: Sequence[StoredArrays]
) -> dict[str, list[Entry]]:
    """Return the tensors of every weight file: each new tensor is in the file of what it replaces."""
    entries: dict[str, list[Entry]] = {file.name: [] for file in checkpoint.folder.files}
    scaled = smaller.scaled()
    for name, info in smaller.copied().items():
        entry = _scaled_entry(name, info, scaled[name]) if name in scaled else Entry(name, info.dtype, info)
        entries[info.file.name].append(entry)
    for layer, arrays in zip(checkpoint.wiring.layers, layers, strict=True):
        replaced = [checkpoint.folder.tensors[linear.weight] for linear in layer.attention.matrices]
        dtype = widest_float(replaced)
        for name in arrays:

            def _make(name: str, arrays: StoredArrays = arrays, dtype: str = dtype) -> Array:
                return encode_in_range(name, arrays[name], dtype)

            entries[replaced[-1].file.name].append(lazy_entry(name, dtype, arrays[name].shape, _make))
    return entries


def _scaled_entry(name: str, info: TensorInfo, factor: float) -> Entry:
    """Return a tensor times a factor, made when its turn comes to be written."""
    return lazy_entry(
        name, info.dtype, info.shape, lambda _: encode_in_range(name, factor * info.read_finite(), info.dtype)
    )
