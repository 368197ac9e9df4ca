"""Connection to the workers of a compression: processes of this machine, or a Dask cluster.

Tasks are submitted when those that they follow are done, and their results are dropped from the cluster at once: when
a worker dies, only what it was running is run again.
"""

from __future__ import annotations

import heapq
import logging
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tnlib import ArgumentError
from tnlib.out_of_core.dask_executor import POLL, Patience, connected
from tnlib_adapters.compression.request import Progress, Request, quiet

CONNECT_TIMEOUT = 30  # seconds until an address is given up
_AHEAD = 2  # tasks per worker that are submitted: a worker that is done finds the next one
_RESUMED = "A folder of spill is kept, and the same call goes on from it"

_one_at_a_time = threading.Lock()  # a running model serves one task; worker processes may have several threads


@dataclass(frozen=True)
class Task:
    """A call on a worker.

    Parameters
    ----------
    name
        Name, unique among the tasks that run together.
    call
        Function that workers can import, or a `partial` of one. It may be called twice, at the same time: it writes
        files under temporary names and moves them into place, and returns little.
    after
        Names of the tasks that must be done before.
    stage
        Stage that its end is a step of.
    takes
        Names of tasks that must be done before, and whose results are the last arguments.
    """

    name: str
    call: Callable[..., Any]
    after: tuple[str, ...] = ()
    stage: str = ""
    takes: tuple[str, ...] = ()


class _Waiting:
    """Tasks that are not submitted, by what they follow."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._names = list(self._tasks)
        self.positions = {name: k for k, name in enumerate(self._names)}
        self._missing = {task.name: {*task.after, *task.takes} for task in tasks}
        self._followers: dict[str, list[str]] = {name: [] for name in self._tasks}
        for name, missing in self._missing.items():
            for before in missing:
                self._followers[before].append(name)
        self._ready = [k for k, missing in enumerate(self._missing.values()) if not missing]
        self._left = set(self._names)

    def __bool__(self) -> bool:
        return bool(self._left)

    def pop(self) -> Task | None:
        """Return the first task whose predecessors are all done, and drop it here; None if there is none."""
        # Followers of running tasks wait: Dask would place them all on the worker that holds their predecessors.
        if not self._ready:
            return None
        name = self._names[heapq.heappop(self._ready)]
        self._left.discard(name)
        return self._tasks[name]

    def finish(self, name: str) -> str:
        """Take a task as done; return its stage."""
        for follower in self._followers[name]:
            self._missing[follower].discard(name)
            if not self._missing[follower]:
                heapq.heappush(self._ready, self.positions[follower])
        return self._tasks[name].stage


class Cluster:
    """Workers, and a folder that all of them see.

    Parameters
    ----------
    client
        Dask client.
    folder
        Folder for files that are removed in the end.
    address
        Address for messages.

    Attributes
    ----------
    run_id
        Unique among all compressions: workers keep what they opened for one.
    """

    def __init__(self, client: Any, folder: Path, address: str) -> None:
        self._client, self.folder, self._address = client, folder, address
        self.run_id, self._n_submitted = secrets.token_hex(8), 0
        self._warming: list[Any] = []

    @property
    def n_workers(self) -> int:
        """Number of workers, at least 1."""
        with self._connected():
            return max(1, len(self._client.nthreads()))

    def check_sees(self, *files: Path) -> None:
        """Raise unless every worker sees these files.

        Raises
        ------
        ArgumentError
            If one does not.
        """
        with self._connected():
            self._client.wait_for_workers(1, timeout=CONNECT_TIMEOUT)
            missing = self._client.run(missing_files, [str(file.absolute()) for file in files])
        for worker, own in sorted(missing.items()):
            if own:
                raise ArgumentError(
                    f"compress: cluster must be of workers that see all folders under the same paths, got worker "
                    f"{worker} without {own[0]}; place IN, OUT and spill on a shared file system."
                )

    def check_shares(self, folder: Path) -> None:
        """Raise unless every worker sees the files that are written into a folder."""
        probe = folder / f".{self.run_id}.probe"
        probe.touch()
        try:
            self.check_sees(probe)
        finally:
            probe.unlink()

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Let every worker do a call, while this process goes on; errors are those of a later task."""
        with self._connected():
            workers = list(self._client.nthreads())
            options = {"workers": workers, "allow_other_workers": True, "pure": False}
            self._warming = self._client.map(call_alone, [call] * len(workers), **options)

    def run(self, tasks: Sequence[Task], progress: Progress = quiet) -> dict[str, Any]:
        """Run tasks, in this order as far as those that they follow are done, and return their results by name.

        `progress` is called with (stage, done, total) at the end of each. An error of a task is raised here.

        Raises
        ------
        ClusterError
            If the connection, or all workers, are lost.
        """
        waiting, results, futures = _Waiting(tasks), dict[str, Any](), dict[str, Any]()
        totals, counts = Counter(task.stage for task in tasks), Counter[str]()
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        at_once = _AHEAD * self.n_workers
        while waiting or futures:
            with self._connected():
                while len(futures) < at_once and (task := waiting.pop()) is not None:
                    call = partial(task.call, *(results[name] for name in task.takes))
                    future = self._submit(task.name, call, -waiting.positions[task.name])
                    futures[task.name] = future
                    future.add_done_callback(lambda _, name=task.name: done.put(name))
                name = self._next(done)
                error = _error_of(futures[name])
                results[name] = futures.pop(name).result() if error is None else None
            if error is not None:
                raise error
            stage = waiting.finish(name)
            counts[stage] += 1
            progress(stage, counts[stage], totals[stage])
        return results

    def _submit(self, name: str, call: Callable[[], Any], priority: int) -> Any:
        self._n_submitted += 1
        key = f"tnlib-{self.run_id}-{self._n_submitted}/{name}"
        return self._client.submit(call_alone, call, key=key, priority=priority, pure=False)

    def _next(self, done: queue.SimpleQueue[str]) -> str:
        """Return the name of the next task that is done."""
        patience = Patience(self._client)
        while True:
            with suppress(queue.Empty):
                return done.get(timeout=POLL)
            patience.check()

    def _connected(self) -> AbstractContextManager[None]:
        """Turn errors of the connection inside into one sentence."""
        memory, advice = f"pass max_memory, or fewer workers. {_RESUMED}", f"start them again. {_RESUMED}"
        return connected("compress", self._address, memory=memory, advice=advice)


def call_alone(call: Callable[[], Any]) -> Any:
    """Return the result of a call, while no other runs in this process."""
    with _one_at_a_time:
        return call()


def import_libraries(source: Path) -> None:
    """Import what a model of this folder needs, which takes seconds."""
    from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
    from tnlib_adapters.instrument.stored_weights import make_without_weights

    make_without_weights("compress", open_checkpoint(source))


def _error_of(future: Any) -> BaseException | None:
    """Return the error that a task raised, None if it has a result; raise if the cluster gave it up."""
    from distributed import KilledWorker

    error: BaseException | None = future.exception()
    if isinstance(error, KilledWorker):
        raise error
    return None if error is None else error.with_traceback(future.traceback())


def missing_files(paths: Sequence[str]) -> list[str]:
    """Return the paths that do not exist."""
    return [path for path in paths if not Path(path).exists()]


@contextmanager
def open_cluster(request: Request, folder: Callable[[], Path], source: Path) -> Iterator[Cluster | None]:
    """Yield the workers that a request names, or None.

    Parameters
    ----------
    request
        Has the address of a cluster, or a number of processes of this machine.
    folder
        Function that returns a folder for files of this run, which all workers must see.
    source
        Checkpoint folder.

    Raises
    ------
    ModuleNotFoundError
        If dask is not installed.
    ArgumentError
        If the address cannot be reached, or a worker does not see a folder.
    """
    address, n_workers = request.cluster, request.workers
    if address is None and n_workers is None:
        yield None
        return
    distributed = _import_distributed()
    with ExitStack() as stack:
        own = folder().absolute()
        scheduler = address or stack.enter_context(_local_workers(distributed, n_workers, own))
        try:
            client = stack.enter_context(distributed.Client(scheduler, timeout=CONNECT_TIMEOUT, set_as_default=False))
        except (OSError, TimeoutError, ValueError) as problem:
            raise ArgumentError(
                f"compress: cluster must be the address of a Dask scheduler, such as tcp://10.0.0.1:8786, got "
                f"{address!r}, which does not answer ({type(problem).__name__}); start one by `dask scheduler`."
            ) from None
        cluster = Cluster(client, own, address or f"{n_workers} local workers")
        cluster.check_shares(own)
        cluster.check_sees(source / "config.json")
        if request.calibrate is not None:
            cluster.warm_up(partial(import_libraries, source.absolute()))
        yield cluster


def _local_workers(distributed: Any, n_workers: int | None, folder: Path) -> Any:
    """Return a Dask cluster of processes of this machine, of one thread each."""
    try:
        return distributed.LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=0,  # workers have the limits of `compress`
            dashboard_address="127.0.0.1:0",  # any free port
            local_directory=str(folder),
            silence_logs=logging.CRITICAL,
        )
    except RuntimeError as problem:
        raise ArgumentError(
            f"compress: workers must be processes that can be started, got {n_workers} that cannot ({problem}); in a "
            'script, call compress below `if __name__ == "__main__":`, because the processes import it.'
        ) from None


def _import_distributed() -> Any:
    try:
        import distributed
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError(
            f"compress: workers and cluster need dask, found no {problem.name}; pip install 'tnlib[cluster]'.",
            name=problem.name,
        ) from None
    return distributed
