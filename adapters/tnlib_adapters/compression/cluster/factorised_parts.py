"""Factorisation of single layers and weights by workers, one task each."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.compression.cluster.connection import Cluster, Task
from tnlib_adapters.compression.cluster.stored_objects import write_in_place
from tnlib_adapters.compression.methods.out_of_core import (
    Factorised,
    LazyPart,
    Workspace,
    entries_of_arrays,
    with_arrays,
    without_arrays,
)
from tnlib_adapters.compression.request import Progress
from tnlib_adapters.compression.source_model import with_vectors_in_memory


@dataclass(frozen=True)
class Job:
    """The compression that a task belongs to.

    Parameters
    ----------
    run_id
        Unique among compressions.
    source
        Checkpoint folder.
    folder
        Folder for factorised weights.
    """

    run_id: str
    source: Path
    folder: Path

    @classmethod
    def of(cls, cluster: Cluster, checkpoint: Checkpoint) -> Job:
        """Return the job of a compression of `checkpoint`."""
        return cls(cluster.run_id, checkpoint.folder.path.absolute(), cluster.folder)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, opened once by every worker."""
        return _opened(self.run_id, self.source)


@functools.lru_cache(maxsize=1)
def _opened(_run_id: str, source: Path) -> Checkpoint:
    return with_vectors_in_memory(open_checkpoint(source))


def store_part(job: Job, part: Any) -> Any:
    """Write the arrays of a factorised weight into a new file, and return it without them, see `without_arrays`."""
    # a file of its own for every attempt: offsets differ between two of them
    file = job.folder / f"{secrets.token_hex(8)}.safetensors"
    return without_arrays(part, write_in_place(file, entries_of_arrays(part)))


def stored_part(part: Any, workspace: Workspace) -> LazyPart:
    """Return a factorised weight that `store_part` returned, in memory as far as `workspace` admits it."""
    return LazyPart(functools.partial(with_arrays, part), workspace, in_file=True)


def factorise_parts(
    cluster: Cluster,
    checkpoint: Checkpoint,
    make: Mapping[str, Callable[[Checkpoint], Factorised]],
    workspace: Workspace,
    progress: Progress,
) -> dict[str, Factorised]:
    """Return factorised weights by module.

    Parameters
    ----------
    cluster
        Workers.
    checkpoint
        The model, opened by every worker from the same path.
    make
        By module, a function that factorises it and that workers can import.
    workspace
        Memory for the factors.
    progress
        Called as progress(stage, done, total).
    """
    job = Job.of(cluster, checkpoint)
    tasks = [Task(module, functools.partial(_factorise, job, own), stage="factorising") for module, own in make.items()]
    progress("factorising", 0, len(tasks))
    parts = cluster.run(tasks, progress)
    return {module: stored_part(parts[module], workspace) for module in make}


def _factorise(job: Job, make: Callable[[Checkpoint], Factorised]) -> Any:
    return store_part(job, make(job.checkpoint()))
