"""Calibration statistics of one chunk of the batches, and of one group of weights: the tasks of workers.

A task returns at once if the files that it writes exist, so that one that was lost with its worker, or with an
interrupted run, is not done again. Sums over chunks have a fixed order, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.selected_weights import GroupCalibration, SelectedWeights
from tnlib_adapters.compression.calibration.statistics import (
    Observations,
    Statistics,
    mean_gates,
    sum_gates,
    sum_moments,
)
from tnlib_adapters.compression.calibration.statistics_files import Spill, StatisticsFiles
from tnlib_adapters.compression.cluster.factorised_parts import Job, store_part
from tnlib_adapters.compression.cluster.stored_objects import ArraysInFiles, write_in_place
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.out_of_core import Factorised, named_entries, with_arrays
from tnlib_adapters.files.tensor_file import read_header

if TYPE_CHECKING:
    from tnlib_adapters.compression.calibration.statistics import Observed
    from tnlib_adapters.instrument.block_passes import Call, Frame
    from tnlib_adapters.instrument.chunked_streams import ChunkedStreams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import Places

_BATCHES, _PARTS_OF_BATCH = "batches", ("ids", "mask")
_PROBES = (0, 1)  # of the moments, and of the gates


@dataclass(frozen=True)
class StatisticsJob(Job):
    """The collection of statistics that a task belongs to.

    Parameters
    ----------
    spill
        Folder of the streams and statistics.
    what
        Compressed part.
    settings
        Arguments of `open_running`.
    n_observed
        Batches that the statistics are of, the first ones.
    origin, statistics
        Origin of the statistics, and their file, see `StatisticsFiles`.
    parts_of
        Function that factorises the weights of a group, as in `collect_calibration`.
    """

    spill: Path
    what: str
    settings: Mapping[str, Any]
    n_observed: int
    origin: Mapping[str, str]
    statistics: Path | None
    parts_of: Callable[[Checkpoint, GroupCalibration], Mapping[str, Factorised]]

    def write_batches(self, batches: Sequence[Batch]) -> None:
        """Store the batches of the text."""
        arrays = {
            f"{part}-{b}": getattr(batch, part).numpy() for b, batch in enumerate(batches) for part in _PARTS_OF_BATCH
        }
        write_in_place(self.file(_BATCHES), named_entries(arrays))

    def running(self) -> RunningChunks:
        """Return the model on the chunks, opened once by every worker."""
        if self.run_id not in _running:
            _running.clear()
            _running[self.run_id] = RunningChunks(self)
        return _running[self.run_id]

    @property
    def files(self) -> StatisticsFiles:
        """Files of the statistics."""
        return StatisticsFiles(Spill(self.spill), self.origin, self.statistics)

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder of the run."""
        return self.spill / f"{name}.safetensors"

    def read(self, name: str) -> ArraysInFiles:
        """Return the arrays of a file in the folder of the run."""
        return ArraysInFiles(read_header(self.file(name))[0])

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write a file in the folder of the run, as a whole."""
        write_in_place(self.file(name), named_entries(arrays))

    def sum(self, names: Sequence[str]) -> dict[str, Array]:
        """Return the sums of the arrays of files: pairs, then pairs of pairs, as rounding errors grow least."""
        files = [self.read(name) for name in names]
        return {key: _tree_sum(files, key) for key in files[0]}


class RunningChunks:
    """The model of a worker, and the streams of the chunks that it runs on."""

    def __init__(self, job: StatisticsJob) -> None:
        self._job = job
        self.weights = SelectedWeights(job.checkpoint(), job.what)
        self._calls: dict[int, list[list[Call]]] = {}
        self._calls_of_texts: dict[tuple[int, int], list[Call]] = {}

    @cached_property
    def model(self) -> RunningModel:
        """The model with folded biases; weights of a block are read when it runs, if not all fit in memory."""
        from tnlib_adapters.instrument.running_model import open_running

        return self.weights.folded(open_running(self._job.checkpoint(), **self._job.settings))

    @cached_property
    def frame(self) -> Frame:
        """What the model computes outside its blocks."""
        from tnlib_adapters.instrument.block_passes import Frame

        return Frame(self.model)

    @cached_property
    def places(self) -> Places:
        """Places of the weights."""
        return self.weights.places(self.model)

    @cached_property
    def streams(self) -> ChunkedStreams:
        """Streams of all batches."""
        import torch

        from tnlib_adapters.instrument.chunked_streams import ChunkedStreams
        from tnlib_adapters.instrument.running_model import Batch

        stored, d_model = self._job.read(_BATCHES), self._job.checkpoint().sizes.d_model
        n = len(stored) // len(_PARTS_OF_BATCH)
        batches = [Batch(*(torch.from_numpy(stored[f"{part}-{b}"]) for part in _PARTS_OF_BATCH)) for b in range(n)]
        return ChunkedStreams(self._job.spill, batches, d_model, self._job.n_observed)

    def calls(self, c: int) -> list[list[Call]]:
        """Return the further arguments of every block by batch of a chunk, and store the input of the first block."""
        from tnlib_adapters.instrument.block_passes import enter

        if c not in self._calls:
            self._calls[c] = enter(self.frame, self.streams.chunks[c][1])
        return self._calls[c]

    def call_of_texts(self, b: int, texts: slice, k: int) -> Call:
        """Return the further arguments of the k-th block for some texts of a batch."""
        import torch

        from tnlib_adapters.instrument.running_model import Batch

        key = (b, texts.start)
        if key not in self._calls_of_texts:
            batch = self.streams.batches[b]
            with torch.no_grad():
                self._calls_of_texts[key] = self.frame.enter(Batch(batch.ids[texts], batch.mask[texts]))[1]
        return self._calls_of_texts[key][k]

    def observations(self, c: int) -> Observations:
        """Return the inputs and gradients of a chunk."""
        batches, streams = self.streams.chunks[c]
        return Observations(self.frame, self.places, streams.batches, streams, first=batches.start)

    def observed(self, c: int, group: int, probe: int) -> Iterable[Observed]:
        """Return the inputs and gradients of a chunk at the weights of a group."""
        from tnlib_adapters.instrument.stored_weights import OUTSIDE

        observations = self.observations(c)
        return observations.outside(probe) if group == OUTSIDE else observations.of_block(group, probe, self.calls(c))

    def has_gradient(self, c: int, probe: int, k: int) -> bool:
        """Test if the gradients of a probe at the input of the k-th block are stored, True for none outside."""
        from tnlib_adapters.instrument.stored_weights import OUTSIDE

        return k == OUTSIDE or self.streams.chunks[c][1].has(f"gradient-{probe}-{k}")


_running: dict[str, RunningChunks] = {}  # of this process; at most one


def run_chunk(job: StatisticsJob, c: int, k: int) -> None:
    """Store the output of the k-th block on a chunk."""
    import torch

    from tnlib_adapters.instrument.block_passes import run_block

    running, name = job.running(), f"stream-{k + 1}"
    batches, streams = running.streams.chunks[c]
    if streams.has(name):
        return
    calls = running.calls(c)
    with torch.no_grad():
        for b in range(len(batches)):
            streams.write(name, b, run_block(running.model, k, streams.read(f"stream-{k}", b), calls[b][k]))
    streams.finish(name)


def store_gradients(job: StatisticsJob, c: int, n_blocks: int) -> None:
    """Store the gradients of the probes at the output of the last block on a chunk."""
    running = job.running()
    for probe in _PROBES:
        if not running.has_gradient(c, probe, n_blocks):
            running.observations(c).store_output(probe)


def store_moments(job: StatisticsJob, c: int, group: int) -> None:
    """Store the moments of the weights of a group on a chunk, and the gradients at the input of the block."""
    running, name = job.running(), _moments(group, c)
    is_summed = job.file(_moments(group)).exists()
    if (is_summed or job.file(name).exists()) and running.has_gradient(c, 0, group):
        return
    moments = sum_moments(running.places, running.observed(c, group, 0))
    if not is_summed:
        job.write(name, _flat(moments))


def make_components(job: StatisticsJob, group: int, n_chunks: int) -> tuple[Any, Any]:
    """Sum the moments of a group over chunks; return its components, and those by weight, without their arrays."""
    running, names = job.running(), [_moments(group, c) for c in range(n_chunks)]
    if not job.file(_moments(group)).exists():
        job.write(_moments(group), job.sum(names))
    _remove(job, names)
    calibration = running.weights.of_group(group, running.places, _nested(job.read(_moments(group))))
    stored: tuple[Any, Any] = store_part(job, (replace(calibration, statistics=Statistics()), calibration.components))
    return stored


def store_gates(job: StatisticsJob, c: int, group: int, stored: tuple[Any, Any]) -> None:
    """Store the losses of components on a chunk, and the gradients at the input of the block."""
    running, name = job.running(), _gates(group, c)
    if job.file(name).exists() and running.has_gradient(c, 1, group):
        return
    components: dict[str, Components] = with_arrays(stored[1])
    job.write(name, sum_gates(running.model, running.places, components, running.observed(c, group, 1)))


def finish_group(job: StatisticsJob, group: int, n_chunks: int, stored: tuple[Any, Any]) -> dict[str, Any]:
    """Save the statistics of a group, and return its factorised weights by module, see `store_part`."""
    running, names = job.running(), [_gates(group, c) for c in range(n_chunks)]
    if not job.files.has(group):
        gates = mean_gates(running.model, running.streams.batches[: job.n_observed], job.sum(names))
        job.files.save(group, replace(_nested(job.read(_moments(group))), gates=gates))
    parts = _factorise(job, with_arrays(stored[0]))
    _remove(job, [_moments(group), *names])
    for probe in _PROBES:
        running.streams.remove(f"gradient-{probe}-{group + 1}")
    return parts


def factorise_group(job: StatisticsJob, group: int) -> dict[str, Any]:
    """Return the factorised weights of a group whose statistics are saved."""
    running = job.running()
    return _factorise(job, running.weights.of_group(group, running.places, job.files.stored()))


def _factorise(job: StatisticsJob, calibration: GroupCalibration) -> dict[str, Any]:
    complete = replace(calibration, statistics=job.files.stored())
    return {module: store_part(job, part) for module, part in job.parts_of(job.checkpoint(), complete).items()}


def _tree_sum(files: Sequence[Mapping[str, Array]], key: str) -> Array:
    if len(files) == 1:
        return files[0][key]
    half = (len(files) + 1) // 2
    total: Array = _tree_sum(files[:half], key) + _tree_sum(files[half:], key)
    return total


def _moments(group: int, c: int | None = None) -> str:
    return f"moments{group}" if c is None else f"moments{group}-chunk{c}"


def _gates(group: int, c: int) -> str:
    return f"gates{group}-chunk{c}"


def _remove(job: StatisticsJob, names: Iterable[str]) -> None:
    for name in names:
        job.file(name).unlink(missing_ok=True)


def _flat(statistics: Statistics) -> dict[str, Array]:
    """Return moments by one name each."""
    return {f"{part}.{key}": a for part in ("reads", "slopes") for key, a in getattr(statistics, part).items()}


def _nested(arrays: Mapping[str, Array]) -> Statistics:
    """Return the moments that `_flat` named, in memory."""
    parts = {part: {k.removeprefix(f"{part}."): arrays[k] for k in arrays if k.startswith(f"{part}.")}
             for part in ("reads", "slopes")}  # fmt: skip
    return Statistics(**parts)
