"""Calibration statistics of one chunk of the batches, and of one group of weights: the tasks of workers.

A task returns at once if the files that it writes exist, so that one that was lost with its worker, or with an
interrupted run, is not done again. Sums over chunks have a fixed order, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.selected_weights import GroupCalibration
from tnlib_adapters.compression.activation_statistics.statistics import (
    Statistics,
    mean_gates,
    sum_gates,
    sum_moments,
)
from tnlib_adapters.compression.activation_statistics.statistics_files import Spill, StatisticsFiles
from tnlib_adapters.compression.cluster.factorised_parts import store_part
from tnlib_adapters.compression.cluster.running_chunks import TextJob
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.out_of_core import Factorised, with_arrays

_PROBES = (0, 1)  # of the moments, and of the gates


@dataclass(frozen=True)
class StatisticsJob(TextJob):
    """The collection of statistics that a task belongs to.

    Parameters
    ----------
    origin, statistics
        Origin of the statistics, and their file, see `StatisticsFiles`.
    parts_of
        Function that factorises the weights of a group, as in `collect_calibration`.
    """

    origin: Mapping[str, str]
    statistics: Path | None
    parts_of: Callable[[Checkpoint, GroupCalibration], Mapping[str, Factorised]]

    @property
    def files(self) -> StatisticsFiles:
        """Files of the statistics."""
        return StatisticsFiles(Spill(self.spill), self.origin, self.statistics)


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
    moments = sum_moments(running.model, running.places, running.observed(c, group, 0))
    if not is_summed:
        job.write(name, _flat(moments))


def make_components(job: StatisticsJob, group: int, n_chunks: int) -> tuple[Any, Any]:
    """Sum the moments of a group over chunks; return its components, and those by weight, without their arrays."""
    running, names = job.running(), [_moments(group, c) for c in range(n_chunks)]
    if not job.file(_moments(group)).exists():
        job.write(_moments(group), job.sum(names))
    _remove(job, names)
    calibration = running.components_of_group(group, _nested(job.read(_moments(group))))
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
    return _factorise(job, running.components_of_group(group, job.files.stored()))


def _factorise(job: StatisticsJob, calibration: GroupCalibration) -> dict[str, Any]:
    complete = replace(calibration, statistics=job.files.stored())
    return {module: store_part(job, part) for module, part in job.parts_of(job.checkpoint(), complete).items()}


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
