"""Calibration statistics of a text, and the weights that are factorised by them, block by block or by workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.component_files import ComponentFile
from tnlib_adapters.compression.activation_statistics.selected_weights import GroupCalibration, SelectedWeights
from tnlib_adapters.compression.activation_statistics.statistics import Statistics, collect
from tnlib_adapters.compression.activation_statistics.statistics_files import (
    Spill,
    StatisticsFiles,
    digest_of_tokens,
    origin_of,
)
from tnlib_adapters.compression.cluster.chunk_statistics import StatisticsJob
from tnlib_adapters.compression.cluster.cluster_workspace import cluster_of
from tnlib_adapters.compression.cluster.collection import Collection
from tnlib_adapters.compression.cluster.connection import Cluster
from tnlib_adapters.compression.cluster.factorised_parts import stored_part
from tnlib_adapters.compression.cluster.shared_descent import descend_by_workers
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.other_matrices import widest_component
from tnlib_adapters.compression.methods.out_of_core import LazyPart, Workspace
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.compression.text import check_tokens, sample_batches

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.instrument.chunked_streams import ChunkedStreams
    from tnlib_adapters.instrument.layer_fit import Descend
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import Places

# Moments and gates converge with few tokens; the fit has as many unknowns as a layer.
TOKENS_OF_STATISTICS = 32_768
TOKENS_OF_FIT = 65_536


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
    weights, sample = SelectedWeights(checkpoint, what), sample_batches(batches, TOKENS_OF_STATISTICS)
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
        return cluster_of(self.workspace)


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

    n_first = len(sample_batches(batches, TOKENS_OF_STATISTICS))
    in_fit, width = sample_batches(batches, TOKENS_OF_FIT), model.sizes.d_model
    return ChunkedStreams(spill.folder, in_fit, width, n_first, model.dtype)


def spill_of(folder: Path | None, workspace: Workspace | None) -> Spill:
    """Return the folder of a run; without one a temporary folder, which the workers see if there are any."""
    cluster = cluster_of(workspace)
    if folder is None and cluster is not None:
        folder = cluster.folder / "spill"
    return Spill(folder)
