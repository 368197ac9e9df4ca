"""Second moments of the inputs of all weights, collected by workers: one task for every chunk of the batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.statistics import moments_by_group
from tnlib_adapters.compression.cluster.connection import Cluster, Task
from tnlib_adapters.compression.cluster.running_chunks import TextJob
from tnlib_adapters.compression.cluster.stored_objects import ArraysInFiles
from tnlib_adapters.compression.request import Progress

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch, RunningModel


def collect_inputs(
    cluster: Cluster,
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    what: str,
    progress: Progress,
) -> Mapping[str, Array]:
    """Return by key the input moments of the weights of `what` over the batches, as `collect_reads`, in files."""
    from tnlib_adapters.instrument.chunked_streams import ChunkedStreams

    spill = cluster.folder / "inputs"
    spill.mkdir()
    job = TextJob(
        run_id=cluster.run_id,
        source=checkpoint.folder.path.absolute(),
        folder=cluster.folder,
        spill=spill,
        what=what,
        settings=model.settings,
        folds_biases=False,
        n_observed=len(batches),
    )
    job.write_batches(batches)
    n_chunks = len(ChunkedStreams(spill, batches, model.sizes.d_model, len(batches)).chunks)
    stage = "reading inputs"
    chunks = [Task(f"inputs {c}", partial(store_inputs, job, c), stage=stage) for c in range(n_chunks)]
    groups = cluster.run(chunks, progress)["inputs 0"]
    sums = [Task(f"sum {group}", partial(sum_inputs, job, group, n_chunks), stage="adding moments") for group in groups]
    summed = cluster.run(sums, progress)
    return ArraysInFiles({key: info for own in summed.values() for key, info in own.tensors.items()})


def store_inputs(job: TextJob, c: int) -> list[int]:
    """Store the moments of all weights on a chunk, one file for each group; return the groups."""
    running, groups = job.running(), list[int]()
    batches = running.streams.chunks[c][1].batches
    for group, sums in moments_by_group(running.model, running.places, batches):
        job.write(_inputs(group, c), sums)
        groups.append(group)
    return groups


def sum_inputs(job: TextJob, group: int, n_chunks: int) -> ArraysInFiles:
    """Store the sums of the moments of a group over chunks, and return them."""
    name = f"inputs{group}"
    if not job.file(name).exists():
        job.write(name, job.sum([_inputs(group, c) for c in range(n_chunks)]))
    for c in range(n_chunks):
        job.file(_inputs(group, c)).unlink(missing_ok=True)
    return job.read(name)


def _inputs(group: int, c: int) -> str:
    return f"inputs{group}-chunk{c}"
