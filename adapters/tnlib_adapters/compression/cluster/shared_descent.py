"""Gradient descent of the fit by several workers: the texts of every batch are shared out.

Workers exchange gradients through files, and every worker moves all factors itself. A worker that comes late reads the
gradients of the steps that it missed, from the last state on that is stored.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.cluster.chunk_statistics import StatisticsJob
from tnlib_adapters.compression.cluster.connection import Cluster, Task
from tnlib_adapters.compression.cluster.factorised_parts import store_part
from tnlib_adapters.compression.methods.out_of_core import with_arrays
from tnlib_adapters.factors.projections import Products

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block import Block
    from tnlib_adapters.instrument.layer_fit import FitStreams
    from tnlib_adapters.instrument.partial_descent import PartialDescent

_MOST_STEPS, _MOST_BYTES = 25, 2**28  # between two states that are stored: steps, and gradients of a part
# Multiplications of a step of a block from which on it is shared: below, the exchange takes longer than the step
_LEAST_WORK = 3e8


@dataclass(frozen=True)
class SharedDescent:
    """The gradient descent of one block.

    Parameters
    ----------
    job
        What all tasks share.
    k
        Index of the block.
    start
        Its factors, see `store_part`.
    order
        Batches of the steps.
    state_every
        Steps after which the state is stored; gradients of twice as many are kept.
    """

    job: StatisticsJob
    k: int
    start: Any
    order: Sequence[int]
    state_every: int

    @property
    def folder(self) -> Path:
        """Folder of gradients and states."""
        return self.job.folder / f"descent-{self.k}"

    def gradient_file(self, step: int, part: int) -> Path:
        """Return the file of the gradient of a part of the batch of a step."""
        return self.folder / f"gradient-{step}-{part}.npy"

    def state_file(self, step: int) -> Path:
        """Return the file of the state before a step."""
        return self.folder / f"state-{step}.npy"


def descend_by_workers(
    cluster: Cluster, job: StatisticsJob, block: Block, streams: FitStreams, start: Products, order: Sequence[int]
) -> Products:
    """Return the factors after one step of Adam on every batch of `order`, as the fit in one process.

    Small blocks, and single texts, are fitted in this process.
    """
    from tnlib_adapters.instrument.block import as_array, as_tensor
    from tnlib_adapters.instrument.layer_fit import descend
    from tnlib_adapters.instrument.partial_descent import parts_of_batch

    n_parts = [len(parts_of_batch(streams.batches[b])) for b in order]
    n_numbers = sum(a.numel() for a in start.parts)
    work = n_numbers * max((streams.batches[b].n_tokens for b in order), default=0)
    if work < _LEAST_WORK or max(n_parts, default=1) == 1:
        return descend(block, streams, start, order)
    state_every = max(1, min(_MOST_STEPS, _MOST_BYTES // max(1, 4 * n_numbers)))
    shared = SharedDescent(job, block.k, store_part(job, start.each(as_array)), order, state_every)
    shared.folder.mkdir()
    products: Products = with_arrays(cluster.run([*_tasks(shared, n_parts)])["end"])
    shutil.rmtree(shared.folder)
    return products.each(lambda a: as_tensor(a, block.model.device))


def _tasks(shared: SharedDescent, n_parts: Sequence[int]) -> Iterator[Task]:
    before: tuple[str, ...] = ()
    for step, n in enumerate(n_parts):
        names = tuple(f"step {step} {part}" for part in range(n))
        yield from (Task(name, partial(store_gradient, shared, step, p), before) for p, name in enumerate(names))
        before = names
    yield Task("end", partial(finish_descent, shared), before)


def store_gradient(shared: SharedDescent, step: int, part: int) -> None:
    """Store the gradient of one part of the batch of a step."""
    file = shared.gradient_file(step, part)
    if file.exists():
        return
    descent = _descent_at(shared, step)
    if part == 0 and step % shared.state_every == 0 and step > 0:
        _save(shared.state_file(step), descent.state())
        _remove_before(shared, step - shared.state_every)
    _save(file, _gradient(shared, descent, shared.order[step], part))


def finish_descent(shared: SharedDescent) -> Any:
    """Return the factors after all steps, see `store_part`."""
    from tnlib_adapters.instrument.block import as_array

    return store_part(shared.job, _descent_at(shared, len(shared.order)).products().each(as_array))


_descents: dict[tuple[str, int], PartialDescent] = {}  # of this process; at most one


def _descent_at(shared: SharedDescent, step: int) -> PartialDescent:
    """Return the descent of this process before a step."""
    key = (shared.job.run_id, shared.k)
    descent = _descents.get(key)
    if descent is None or not 0 <= step - descent.n_done <= shared.state_every:  # gradients before are removed
        _descents.clear()
        descent = _descents[key] = _restored(shared, step)
    while descent.n_done < step:
        descent.step(_sum_of_parts(shared, descent.n_done))
    return descent


def _restored(shared: SharedDescent, step: int) -> PartialDescent:
    """Return the descent in the last state that is stored before a step."""
    from tnlib_adapters.instrument.block import Block, as_tensor
    from tnlib_adapters.instrument.partial_descent import PartialDescent

    block = Block(shared.job.running().model, shared.k)
    start: Products = with_arrays(shared.start)
    descent = PartialDescent(block, start.each(lambda a: as_tensor(a, block.model.device)), len(shared.order))
    stored = [at for at in range(step, 0, -1) if at % shared.state_every == 0 and shared.state_file(at).exists()]
    if stored:
        descent.restore(np.load(shared.state_file(stored[0])), stored[0])
    return descent


def _gradient(shared: SharedDescent, descent: PartialDescent, b: int, part: int) -> Array:
    from tnlib_adapters.instrument.partial_descent import parts_of_batch

    running, k = shared.job.running(), shared.k
    batch = running.streams.batches[b]
    texts = parts_of_batch(batch)[part]
    rows = slice(texts.start, texts.stop)
    x, target = (running.streams.read(name, b)[rows] for name in (f"truncated-{k}", f"stream-{k + 1}"))
    return descent.gradient(x, running.call_of_texts(b, rows, k), target, batch.valid[rows], batch.n_tokens)


def _sum_of_parts(shared: SharedDescent, step: int) -> Array:
    """Return the gradient of a batch: the sum over its parts, always in the same order."""
    from tnlib_adapters.instrument.partial_descent import parts_of_batch

    n_parts = len(parts_of_batch(shared.job.running().streams.batches[shared.order[step]]))
    total: Array = np.load(shared.gradient_file(step, 0))
    for part in range(1, n_parts):
        total += np.load(shared.gradient_file(step, part))
    return total


def _remove_before(shared: SharedDescent, step: int) -> None:
    """Delete gradients and states that no worker reads any more."""
    for file in shared.folder.glob("*.npy"):
        if int(file.stem.split("-")[1]) < step:
            file.unlink(missing_ok=True)


def _save(file: Path, array: Array) -> None:
    """Write an array into a file that appears whole."""
    hidden = file.with_name(f".{secrets.token_hex(8)}")
    with hidden.open("wb") as opened:
        np.save(opened, array)
    hidden.replace(file)
