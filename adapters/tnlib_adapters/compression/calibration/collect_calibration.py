"""Calibration statistics of a text, and the weights that are factorised by them, block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.component_files import ComponentFile
from tnlib_adapters.compression.activation_statistics.selected_weights import (
    GroupCalibration,
    SelectedWeights,
    WeightGroup,
)
from tnlib_adapters.compression.activation_statistics.statistics import Statistics, collect
from tnlib_adapters.compression.activation_statistics.statistics_files import (
    Spill,
    StatisticsFiles,
    digest_of_tokens,
    origin_of,
)
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.other_matrices import widest_component
from tnlib_adapters.compression.methods.out_of_core import LazyPart, Workspace
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.text import check_tokens, sample_batches

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import Places

# Moments and gates converge with few tokens; the fit has as many unknowns as a layer.
TOKENS_OF_STATISTICS = 32_768
TOKENS_OF_FIT = 65_536


# function of the checkpoint and of a group; without its arrays the checkpoint tells what is stored how
PartsOf = Callable[[Checkpoint, Any], Mapping[str, Factorised]]


def collect_calibration(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    parts_of: PartsOf,
    request: Request,
    *,
    spill: Spill | None = None,
    workspace: Workspace | None = None,
) -> dict[str, LazyPart]:
    """Return the layers and other weights that a request selects, by module, factorised by statistics of a text.

    The statistics are collected block by block.

    Parameters
    ----------
    checkpoint, model
        The model on disk, and running.
    batches
        Batches of the calibration text.
    parts_of
        Function that factorises the weights of a `GroupCalibration`, of a `WeightGroup` for a request in bits.
    request
        Compressed part, statistics file and progress. In bits, weighted moments are collected, and no components.
    spill
        Folder for what is between blocks, from which an interrupted collection is resumed; None for a temporary one.
    workspace
        Memory and temporary files of the factorised weights, and the executor that makes them.
    """
    what, rounding, progress = request.what, request.in_bits, request.run.progress
    check_tokens(model.function, batches, widest_component(checkpoint, what), "components")
    weights, sample = SelectedWeights(checkpoint, what), sample_batches(batches, TOKENS_OF_STATISTICS)
    model, spill = weights.folded(model), spill or Spill()
    places = weights.places(model)
    streams = streams_of_fit(model, batches, spill)
    origin = origin_of(checkpoint, sample, places, model.longest, rounding=rounding)
    files = StatisticsFiles(spill, origin, request.statistics)
    files.is_complete()  # raises if it is of another model
    spill.claim(origin | {"streams": digest_of_tokens(streams.batches), "dtype": f"{model.dtype}"})
    workspace = workspace or Workspace()
    groups = _Groups(weights, places, model.device, parts_of, workspace, spill, rounding=rounding)

    def save(group: int, statistics: Statistics) -> None:
        files.save(group, statistics)
        groups.factorise(group, statistics)

    if not files.is_complete():
        done, components = files.done(), None if rounding else groups.components
        collect(model, places, sample, progress, components=components, streams=streams, save=save, done=done,
                rounding=rounding)  # fmt: skip
        files.join()
    for group in sorted({place.group for place in places.values()} - groups.factorised):  # collected before
        statistics = files.statistics({name for key, place in places.items() if place.group == group
                                       for name in (key, place.reads)})  # fmt: skip
        if not rounding:
            groups.components(group, statistics)
        groups.factorise(group, statistics)
    parts = groups.parts()
    return {module: parts[module] for module in weights.modules}


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
        *,
        rounding: bool,
    ) -> None:
        self._weights, self._places, self._device = weights, places, device
        self._parts_of, self._workspace, self._spill = parts_of, workspace, spill
        self._current: GroupCalibration | None = None
        self._rounding = rounding
        self._pending: deque[Future[Mapping[str, Factorised]]] = deque()
        self._parts: dict[str, LazyPart] = {}
        self.factorised: set[int] = set()

    def components(self, group: int, moments: Statistics) -> dict[str, Components]:
        """Return the components of the weights of a group."""
        file, workers = ComponentFile(self._spill.saved(f"components{group}")), self._workspace.workers
        self._current = self._weights.of_group(group, self._places, moments, self._device, file, workers)
        return self._current.components

    def factorise(self, group: int, statistics: Statistics) -> None:
        """Start to factorise the weights of the group whose components were made last, by its statistics."""
        own: WeightGroup
        if self._rounding:
            own = self._weights.read_group(group, self._places, statistics)
        elif self._current is None or self._current.index != group:
            raise RuntimeError(f"collect_calibration: components of group {group} must be made before.")
        else:
            own = replace(self._current, statistics=statistics)
        call = partial(self._parts_of, self._weights.checkpoint, own)
        self._pending.append(self._workspace.workers.submit(call))
        self._current = None
        self.factorised.add(group)
        self._gather(self._workspace.workers.n_pending - 1)

    def parts(self) -> dict[str, LazyPart]:
        """Return the factorised weights by module."""
        self._gather(0)
        return self._parts

    def _gather(self, n_pending: int) -> None:
        """Wait for all groups but the last few."""
        while len(self._pending) > n_pending:
            for module, part in self._workspace.workers.result(self._pending.popleft()).items():
                self._parts[module] = LazyPart(partial(_same, part), self._workspace)


def _same(part: Factorised) -> Factorised:
    return part


def streams_of_fit(model: RunningModel, batches: Sequence[Batch], spill: Spill) -> Streams:
    """Return the streams of the batches of the fit, of which those of the statistics are the first."""
    from tnlib_adapters.instrument.block_passes import Streams

    return Streams(spill.folder, sample_batches(batches, TOKENS_OF_FIT), model.sizes.d_model, model.dtype)
