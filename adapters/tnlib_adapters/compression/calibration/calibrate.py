"""Calibrated factorisation of all layers: statistics of a text, rank selection, block-wise reconstruction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.component_files import ComponentFile
from tnlib_adapters.compression.calibration.fitted_files import Fitted, FittedFiles
from tnlib_adapters.compression.calibration.selected_weights import GroupCalibration, SelectedWeights
from tnlib_adapters.compression.calibration.statistics import Statistics, collect
from tnlib_adapters.compression.calibration.statistics_files import Spill, StatisticsFiles, digest_of_tokens, origin_of
from tnlib_adapters.compression.calibration.text import check_tokens, sample_batches
from tnlib_adapters.compression.cluster.chunk_statistics import StatisticsJob
from tnlib_adapters.compression.cluster.collection import Collection
from tnlib_adapters.compression.cluster.connection import Cluster
from tnlib_adapters.compression.cluster.factorised_parts import stored_part
from tnlib_adapters.compression.cluster.shared_descent import descend_by_workers
from tnlib_adapters.compression.methods.calibrated import CalibratedLayer
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised, measure_of_text
from tnlib_adapters.compression.methods.other_matrices import Matrix, names_of, widest_component
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredArrays, Workspace
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.compression.sizes import count_attention, count_matrix
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Products

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.chunked_streams import ChunkedStreams
    from tnlib_adapters.instrument.layer_fit import Descend
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import Places

# Moments and gates converge with few tokens; the fit has as many unknowns as a layer.
_TOKENS_OF_STATISTICS = 32_768
_TOKENS_OF_FIT = 65_536
_STEPS = 400  # optimizer steps per layer
# Losses of unembeddings count twice: the fit of a layer halves its loss (built-in Llama: 0.38 to 0.19 and 0.053 to
# 0.026 nats a token), and unembeddings are not fitted
_NOT_FITTED = 2


@dataclass(frozen=True)
class Calibration:
    """Factorised layers and other weights of a model, by module, and the statistics of all.

    With workers, `descend_by` is the gradient descent of the fit by these.
    """

    parts: dict[str, LazyPart]
    statistics: Statistics
    descend_by: Descend | None = None


# function of the checkpoint and of a group; with workers, one that they can import
PartsOf = Callable[[Checkpoint, GroupCalibration], Mapping[str, Factorised]]


def collect_calibration(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    parts_of: PartsOf,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
    spill: Spill | None = None,
    workspace: Workspace | None = None,
) -> Calibration:
    """Collect calibration statistics block by block, and factorise the weights that `what` selects by them.

    Parameters
    ----------
    checkpoint, model
        The model on disk, and running.
    batches
        Batches of the calibration text.
    parts_of
        Function that factorises the weights of a group.
    progress
        Called as progress(stage, done, total).
    what
        Compressed part; there are no layers for "mlp" and for attention on latent vectors.
    file
        Statistics file, or None.
    spill
        Folder for what is between blocks, from which an interrupted collection is resumed; None for a temporary one.
    workspace
        Memory and temporary files of the factorised weights.
    """
    check_tokens(model.function, batches, widest_component(checkpoint, what), "components")
    weights, sample = SelectedWeights(checkpoint, what), sample_batches(batches, _TOKENS_OF_STATISTICS)
    model, spill = weights.folded(model), spill or Spill()
    places = weights.places(model)
    streams, origin = streams_of_fit(model, batches, spill), origin_of(checkpoint, sample, places, model.longest)
    files = StatisticsFiles(spill, origin, file)
    files.is_complete()  # raises if it is of another model
    stored = {
        "streams": digest_of_tokens(streams.batches),
        "chunks": f"{len(streams.chunks)}",
        "dtype": f"{model.dtype}",
    }
    spill.claim(origin | stored)
    run = _Run(weights, model, places, sample, streams, files, parts_of, workspace or Workspace())
    parts = run.parts(progress) if run.cluster is None else run.parts_of_workers(run.cluster, progress)
    descend_by = None if run.cluster is None else partial(descend_by_workers, run.cluster, run.job(run.cluster))
    return Calibration({module: parts[module] for module in weights.modules}, files.statistics(), descend_by)


@dataclass(frozen=True)
class _Run:
    """Collection of the statistics of a text, and factorisation by them.

    Parameters
    ----------
    weights, places
        The compressed weights, and their places in the model.
    model
        With folded biases.
    sample, streams
        Batches of the statistics, and streams of these and those of the fit.
    files
        Statistics on disk.
    parts_of, workspace
        As in `collect_calibration`.
    """

    weights: SelectedWeights
    model: RunningModel
    places: Places
    sample: Sequence[Batch]
    streams: ChunkedStreams
    files: StatisticsFiles
    parts_of: PartsOf
    workspace: Workspace

    def parts(self, progress: Progress) -> dict[str, LazyPart]:
        """Return the factorised weights by module."""
        groups = _Groups(self.weights, self.places, self.model.device, self.parts_of, self.workspace, self.files.spill)

        def save(group: int, statistics: Statistics) -> None:
            self.files.save(group, statistics)
            groups.factorise(group, statistics)

        if not self.files.is_complete():
            done, components, streams = self.files.done(), groups.components, self.streams
            passed = self.model, self.places, self.sample, progress
            collect(*passed, components=components, streams=streams, save=save, done=done)
            self.files.join()
        statistics = self.files.statistics()
        for group in sorted({place.group for place in self.places.values()} - groups.factorised):  # collected before
            groups.components(group, statistics)
            groups.factorise(group, statistics)
        return groups.parts

    def parts_of_workers(self, cluster: Cluster, progress: Progress) -> dict[str, LazyPart]:
        """Return the factorised weights by module, made by workers."""
        job, n_blocks = self.job(cluster), len(self.model.layers)
        groups = sorted({*range(n_blocks), *(place.group for place in self.places.values())})
        cluster.check_shares(job.spill)
        done = groups if self.files.is_complete() else sorted(self.files.done())
        parts = Collection(job, self.streams, groups, done).run(cluster, progress)
        self.files.join()
        return {module: stored_part(part, self.workspace) for module, part in parts.items()}

    def job(self, cluster: Cluster) -> StatisticsJob:
        """Return what the tasks of workers share."""
        return StatisticsJob(
            run_id=cluster.run_id,
            source=self.weights.checkpoint.folder.path.absolute(),
            folder=cluster.folder,
            spill=self.streams.folder.absolute(),
            what=self.weights.what,
            settings=self.model.settings,
            folds_biases=True,
            n_observed=len(self.sample),
            origin=self.files.origin,
            statistics=self.files.file,
            parts_of=self.parts_of,
        )

    @property
    def cluster(self) -> Cluster | None:
        """The workers."""
        return self.workspace.cluster


class _Groups:
    """Factorised weights, block by block: components of the weights of a block, then all forms of these by their gates.

    Parameters are those of `collect_calibration`; large weights are decomposed on `device`.
    """

    def __init__(
        self,
        weights: SelectedWeights,
        places: Places,
        device: torch.device,
        parts_of: PartsOf,
        workspace: Workspace,
        spill: Spill,
    ) -> None:
        self._weights, self._places, self._device = weights, places, device
        self._parts_of, self._workspace, self._spill = parts_of, workspace, spill
        self._current: GroupCalibration | None = None
        self.parts: dict[str, LazyPart] = {}
        self.factorised: set[int] = set()

    def components(self, group: int, moments: Statistics) -> dict[str, Components]:
        """Return the components of the weights of a group."""
        file = ComponentFile(self._spill.saved(f"components{group}"))
        self._current = self._weights.of_group(group, self._places, moments, self._device, file)
        return self._current.components

    def factorise(self, group: int, statistics: Statistics) -> None:
        """Factorise the weights of the group whose components were made last, by its statistics."""
        if self._current is None or self._current.index != group:
            raise RuntimeError(f"collect_calibration: components of group {group} must be made before.")
        current = replace(self._current, statistics=statistics)
        for module, part in self._parts_of(self._weights.checkpoint, current).items():
            self.parts[module] = LazyPart(partial(_same, part), self._workspace)
        self._current = None
        self.factorised.add(group)


def _same(part: Factorised) -> Factorised:
    return part


def streams_of_fit(model: RunningModel, batches: Sequence[Batch], spill: Spill) -> ChunkedStreams:
    """Return the streams of the batches of the fit, of which those of the statistics are the first."""
    from tnlib_adapters.instrument.chunked_streams import ChunkedStreams

    n_first = len(sample_batches(batches, _TOKENS_OF_STATISTICS))
    in_fit, width = sample_batches(batches, _TOKENS_OF_FIT), model.sizes.d_model
    return ChunkedStreams(spill.folder, in_fit, width, n_first, model.dtype)


def calibrated_parts(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    progress: Progress = quiet,
    *,
    what: str = "attention",
) -> tuple[list[CalibratedLayer], list[Matrix]]:
    """Return the attention layers and other matrices with components ordered by their effect on the model output.

    Parameters are those of `collect_calibration`.
    """
    parts = [
        part.load()
        for part in collect_calibration(checkpoint, model, batches, weighed_parts, progress, what=what).parts.values()
    ]
    layers = [part for part in parts if isinstance(part, CalibratedLayer)]
    return layers, [part for part in parts if isinstance(part, Matrix)]


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
    checkpoint: Checkpoint,
    text: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
    folder: Path | None = None,
    source: SourceModel | None = None,
    workspace: Workspace | None = None,
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
    workspace
        Memory and temporary files of the factors.

    Raises
    ------
    ArgumentError
        If the text is too short, or the statistics file belongs to another model, text or choice of weights.
    """
    model, wiring = (source or SourceModel(checkpoint)).original, checkpoint.wiring
    batches, spill = model.batches(text), spill_of(folder, workspace)
    calibration = collect_calibration(
        checkpoint, model, batches, weighed_parts, progress, what=what, file=file, spill=spill, workspace=workspace
    )

    def fit(options: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, list[FactoredMatrix]]]:
        streams = streams_of_fit(model, batches, spill)
        parts, descend_by = calibration.parts, calibration.descend_by
        return fit_factors(model, parts, options, streams, descend_by=descend_by, progress=progress)

    names = names_of(checkpoint, what, with_text=True)
    predict = [name for name in names if wiring.is_unembedding(name) or wiring.is_tied(name)]
    return Factorisation(
        "calibrated",
        calibration.parts,
        n_before(checkpoint, what),
        measure_of_text(checkpoint),
        fit=fit,
        weights=dict.fromkeys(predict, _NOT_FITTED),
        moments=calibration.statistics.reads,
    )


def spill_of(folder: Path | None, workspace: Workspace | None) -> Spill:
    """Return the folder of a run; without one a temporary folder, which the workers see if there are any."""
    if folder is None and workspace is not None and workspace.cluster is not None:
        folder = workspace.cluster.folder / "spill"
    return Spill(folder)


def n_before(checkpoint: Checkpoint, what: str) -> int:
    """Return the numbers in the weights and biases of the compressed part."""
    n_attention = sum(count_attention(checkpoint)) if checkpoint.wiring.projection_layers(what) else 0
    return n_attention + sum(count_matrix(checkpoint, name) for name in names_of(checkpoint, what, with_text=True))


def fit_factors(
    model: RunningModel,
    parts: Mapping[str, LazyPart],
    options: Mapping[str, Sequence[int]],
    streams: Streams,
    n_steps: int | None = None,
    *,
    descend_by: Descend | None = None,
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
        Optimizer steps per layer; None for 400, see `fit_steps`.
    descend_by
        As in `fit_layers`.
    progress
        Called as progress(stage, done, total).
    """
    from tnlib_adapters.instrument.layer_fit import fit_layers

    steps = steps_of_model(model, streams, _STEPS) if n_steps is None else n_steps
    inside, outside = by_block(model.wiring, parts)
    tables = StoredArrays(Workspace(0, lambda: streams.folder))
    for name in outside:
        factors = parts[name].load().factors(options[name])
        if factors and model.wiring.is_embedding(name):
            table = np.linalg.multi_dot([a.astype(np.float64) for a in factors])
            tables.add({name: table.astype(np.float32)})
            del table
        yield name, parts[name].load().packed(factors)

    def start(k: int) -> Products:
        products, factors = Products({}), dict[str, tuple[Array, ...]]()
        for name in inside[k]:
            part = parts[name].load()
            if isinstance(part, CalibratedLayer):
                products = part.products(options[name])
            elif own := part.factors(options[name]):
                factors[name] = own
        return products.beside(factors)

    def fitted(first: int) -> Iterator[Fitted]:
        fit = fit_layers(
            model, streams, start, tables=tables, n_steps=steps, first=first, descend_by=descend_by, progress=progress
        )
        for k, products in enumerate(fit, first):
            loaded = ((name, parts[name].load()) for name in inside[k])
            yield [
                (name, part.packed(products if isinstance(part, CalibratedLayer) else products.factors.get(name, ())))
                for name, part in loaded
            ]

    files = FittedFiles(streams, model.wiring.attention_modules, "calibrated", options, steps)
    yield from saved(files, fitted)


def fit_steps(most: int, n_batches: int, *, fit_in_memory: bool) -> int:
    """Return the optimizer steps of a layer: of a model that does not fit in memory at most one pass over the text."""
    return most if fit_in_memory else min(most, n_batches)


def steps_of_model(model: RunningModel, streams: Streams, most: int) -> int:
    """Return `fit_steps` of a running model."""
    return fit_steps(most, len(streams.batches), fit_in_memory=model.fits_in_memory)


def saved(files: FittedFiles, fit: Callable[[int], Iterator[Fitted]]) -> Iterator[tuple[str, list[FactoredMatrix]]]:
    """Yield the fitted weights of all blocks: those that are saved, then those of `fit` from the next block on."""
    n_done = files.resume()
    for k in range(n_done):
        yield from files.read(k)
    for k, fitted in enumerate(fit(n_done), n_done):
        files.save(k, fitted)
        yield from fitted


def by_block(wiring: Wiring, parts: Iterable[str]) -> tuple[list[list[str]], list[str]]:
    """Return the parts in every block, its attention first, and those outside the blocks."""
    known = list(parts)
    of_blocks = [
        [module, *(matrix.name for matrix in (*layer.latent_matrices, *layer.feed_forward_matrices))]
        for module, layer in zip(wiring.attention_modules, wiring.layers, strict=True)
    ]
    inside = [[name for name in own if name in known] for own in of_blocks]
    return inside, [name for name in known if not any(name in own for own in inside)]
