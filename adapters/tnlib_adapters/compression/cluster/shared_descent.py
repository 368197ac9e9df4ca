"""Gradient descent of the fit by several workers: the texts of every batch are shared out.

Every worker computes the gradient of its share of a batch, reads those of the others from files, and moves all factors
itself. A worker that does not answer is not waited for long: its shares are computed by the others until it is back.
One that comes late goes on from the last state that is stored. Sums have a fixed order, so that the factors do not
depend on which worker computed what.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.cluster.chunk_statistics import StatisticsJob
from tnlib_adapters.compression.cluster.connection import Cluster, Task
from tnlib_adapters.compression.cluster.factorised_parts import store_part
from tnlib_adapters.compression.cluster.running_chunks import halves, tree_sum
from tnlib_adapters.compression.methods.out_of_core import with_arrays
from tnlib_adapters.factors.projections import Products

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block import Block
    from tnlib_adapters.instrument.layer_fit import FitStreams
    from tnlib_adapters.instrument.partial_descent import PartialDescent

_MOST_STEPS, MOST_BYTES = 25, 2**28  # between two states that are stored: steps, and gradients of a share
# Multiplications of a step of a block from which on it is shared: below, the exchange takes longer than the step
LEAST_WORK = 3e8
_PATIENCE, _TIMES = 5, 3  # the share of a worker is awaited for so many seconds, or times the duration of an own share
_SLOW = 1  # seconds of reading a gradient after which it may have been written over
_POLL, _POLLS_OF_CHANGE = 0.001, 50  # seconds between looks for a file, and looks between changes of the folder


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
        Steps after which the state is stored; gradients of three times as many are kept.
    n_workers
        Workers that take part.
    """

    job: StatisticsJob
    k: int
    start: Any
    order: Sequence[int]
    state_every: int
    n_workers: int

    @property
    def folder(self) -> Path:
        """Folder of gradients and states."""
        return self.job.folder / f"descent-{self.k}"

    def gradient_file(self, step: int, share: int) -> Path:
        """Return the file of the gradient of a share of the batch of a step."""
        return self.folder / f"gradient-{step}-{share}.npy"

    def state_file(self, step: int) -> Path:
        """Return the file of the state before a step."""
        return self.folder / f"state-{step}.npy"

    def last_state(self) -> int:
        """Return the last step before which the state is stored, 0 for none."""
        return max((_step_of(file) for file in self.folder.glob("state-*.npy")), default=0)

    def remove_before(self, step: int) -> None:
        """Delete gradients and states that no worker reads any more."""
        for file in self.folder.glob("*.npy"):
            if _step_of(file) < step:
                file.unlink(missing_ok=True)


def descend_by_workers(
    cluster: Cluster, job: StatisticsJob, block: Block, streams: FitStreams, start: Products, order: Sequence[int]
) -> Products:
    """Return the factors after one step of Adam on every batch of `order`, as the fit in one process.

    Small blocks, and single texts, are fitted in this process.
    """
    from tnlib_adapters.instrument.block import as_array, as_tensor
    from tnlib_adapters.instrument.layer_fit import descend
    from tnlib_adapters.instrument.partial_descent import parts_of_batch

    n_parts = max((len(parts_of_batch(streams.batches[b])) for b in order), default=1)
    n_numbers = sum(a.numel() for a in start.parts)
    work = n_numbers * max((streams.batches[b].n_tokens for b in order), default=0)
    if work < LEAST_WORK or n_parts == 1:
        return descend(block, streams, start, order)
    state_every = max(1, min(_MOST_STEPS, MOST_BYTES // max(1, 4 * n_numbers)))
    n_workers = min(cluster.n_workers, n_parts)
    shared = SharedDescent(job, block.k, store_part(job, start.each(as_array)), order, state_every, n_workers)
    shared.folder.mkdir()
    names = tuple(f"worker {w}" for w in range(n_workers))
    tasks = [Task(name, partial(take_part, shared, w)) for w, name in enumerate(names)]
    products: Products = with_arrays(cluster.run([*tasks, Task("end", partial(finish_descent, shared), names)])["end"])
    shutil.rmtree(shared.folder)
    return products.each(lambda a: as_tensor(a, block.model.device))


def take_part(shared: SharedDescent, worker: int) -> None:
    """Do all steps, as one of the workers."""
    _Participant(shared, worker).run()


def finish_descent(shared: SharedDescent) -> Any:
    """Return the factors after all steps, see `store_part`."""
    from tnlib_adapters.instrument.block import as_array

    return store_part(shared.job, _restored(shared).products().each(as_array))


class _Participant:
    """The descent of one worker.

    Parameters
    ----------
    shared
        The descent of all.
    worker
        Number of the worker.
    """

    def __init__(self, shared: SharedDescent, worker: int) -> None:
        self._shared, self._worker = shared, worker
        self._descent = _restored(shared)
        self._patience: float = _PATIENCE
        self._absent = set[int]()  # shares whose workers did not answer
        self._written = deque[Path]()  # gradients that this worker has written

    def run(self) -> None:
        """Do all steps."""
        shared = self._shared
        while (step := self._descent.n_done) < len(shared.order):
            if step > 0 and step % shared.state_every == 0:
                self._store_state()
                shared.remove_before(step - 2 * shared.state_every)
            gradient = self._gradient()
            if gradient is None:
                self._descent = _restored(shared)
            else:
                self._descent.step(gradient)
        self._store_state()

    def _store_state(self) -> None:
        file = self._shared.state_file(self._descent.n_done)
        if not file.exists():
            _save(file, self._descent.state())

    def _gradient(self) -> Array | None:
        """Return the gradient of the batch of the next step, None if the others are too far ahead."""
        shares = self._shares
        if len(shares) == 1:
            return self._of_share(shares[0])
        first_own = sorted(range(len(shares)), key=lambda s: s % self._shared.n_workers != self._worker)
        gradients = dict[int, Array]()
        for s in first_own:
            gradient = self._read_or_compute(s, shares[s])
            if gradient is None:
                return None
            gradients[s] = gradient
        return tree_sum(gradients.__getitem__, range(len(shares)))

    @property
    def _shares(self) -> list[Sequence[range]]:
        """Texts of the next batch by part, shared out: sums over shares are those over parts."""
        from tnlib_adapters.instrument.partial_descent import parts_of_batch

        shares: list[Sequence[range]] = [parts_of_batch(self._batch)]
        while len(shares) < self._shared.n_workers and any(len(own) > 1 for own in shares):
            shares = [half for own in shares for half in halves(own) if half]
        return shares

    def _read_or_compute(self, share: int, parts: Sequence[range]) -> Array | None:
        """Return the gradient of a share, of another worker or its own; None if the others are too far ahead."""
        step, shared = self._descent.n_done, self._shared
        file, is_own = shared.gradient_file(step, share), share % shared.n_workers == self._worker
        gradient = self._await(file, 0 if is_own or share in self._absent else self._patience)
        if gradient is not None:
            self._absent.discard(share)
            return gradient
        if not is_own and shared.last_state() > step:
            return None
        started = time.monotonic()
        gradient = self._of_share(parts)
        self._patience = max(_PATIENCE, _TIMES * (time.monotonic() - started))
        if not is_own:
            self._absent.add(share)
        self._write(file, gradient)
        return gradient

    def _write(self, file: Path, gradient: Array) -> None:
        """Write a gradient, over one that nobody reads any more: pages of a new file cost more than the exchange."""
        hidden = _hidden(file)
        is_old = self._written and _step_of(self._written[0]) < self._descent.n_done - self._shared.state_every
        with suppress(FileNotFoundError):
            if is_old:
                self._written.popleft().replace(hidden)
        _save(file, gradient, hidden)
        self._written.append(file)

    def _await(self, file: Path, seconds: float) -> Array | None:
        """Return the array of a file that appears within these seconds, None if it does not, or is not needed."""
        end, looks = time.monotonic() + seconds, 0
        while True:
            with suppress(FileNotFoundError):
                return self._read(file)
            if time.monotonic() >= end:
                return None
            looks += 1
            if looks % _POLLS_OF_CHANGE == 0:
                if self._shared.last_state() > self._descent.n_done:
                    return None
                _change(self._shared.folder)
            time.sleep(_POLL)

    def _read(self, file: Path) -> Array:
        """Return a gradient; `FileNotFoundError` if it is not there, or was written over meanwhile."""
        started = time.monotonic()
        gradient: Array = np.load(file)
        if time.monotonic() - started > _SLOW:
            _change(self._shared.folder)
        file.stat()
        return gradient

    @property
    def _batch(self) -> Any:
        return self._shared.job.running().streams.batches[self._shared.order[self._descent.n_done]]

    def _of_share(self, parts: Sequence[range]) -> Array:
        """Return the gradient of some parts of the next batch."""
        return tree_sum(self._of_part, parts)

    def _of_part(self, texts: range) -> Array:
        running, k, b = self._shared.job.running(), self._shared.k, self._shared.order[self._descent.n_done]
        batch, rows = self._batch, slice(texts.start, texts.stop)
        x, target = (running.streams.read(name, b, texts) for name in (f"truncated-{k}", f"stream-{k + 1}"))
        call = running.call_of_texts(b, rows, k)
        return self._descent.gradient(x, call, target, batch.valid[rows], batch.n_tokens)


def _restored(shared: SharedDescent) -> PartialDescent:
    """Return the descent in the last state that is stored."""
    from tnlib_adapters.instrument.block import Block, as_tensor
    from tnlib_adapters.instrument.partial_descent import PartialDescent

    block = Block(shared.job.running().model, shared.k)
    start: Products = with_arrays(shared.start)
    descent = PartialDescent(block, start.each(lambda a: as_tensor(a, block.model.device)), len(shared.order))
    while last := shared.last_state():
        with suppress(FileNotFoundError):  # a faster worker has stored a later one
            descent.restore(np.load(shared.state_file(last)), last)
            break
    return descent


def _step_of(file: Path) -> int:
    return int(file.stem.split("-")[1])


def _change(folder: Path) -> None:
    """Change a folder for a moment: network file systems then show what others have written into it, and not later."""
    hidden = _hidden(folder / "changed")
    hidden.touch()
    hidden.unlink()


def _save(file: Path, array: Array, hidden: Path | None = None) -> None:
    """Write an array into a file that appears whole; over the array of a hidden file of this shape if there is one."""
    hidden = hidden or _hidden(file)
    with hidden.open("r+b" if hidden.exists() else "wb") as opened:
        np.save(opened, array)
    hidden.replace(file)


def _hidden(file: Path) -> Path:
    return file.with_name(f".{secrets.token_hex(8)}")
