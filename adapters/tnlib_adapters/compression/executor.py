"""Calls by any executor: in this process, in a pool of processes, or by the workers of a Dask cluster.

A call holds all arrays it needs. Results are used in the order of the calls, so that nothing depends on the executor.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from tnlib import ArgumentError, ClusterError
from tnlib._validate import import_optional

R = TypeVar("R")
_LOST = ("KilledWorker", "ClosedClientError")  # of dask


class _InThisProcess(Executor):
    """Runs every call when it is submitted."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        future = Future[R]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as problem:
            future.set_exception(problem)
        return future


@dataclass(frozen=True)
class Workers:
    """An executor, and the number of calls that may be pending: the arrays of so many are in memory."""

    executor: Executor
    n_pending: int

    def map(self, calls: Iterable[Callable[[], R]]) -> Iterator[R]:
        """Yield the results of calls in their order; a call is taken from the iterable when it is submitted.

        Raises the error of a call; `ClusterError` if the processes are lost.
        """
        pending: deque[Future[R]] = deque()
        for call in calls:
            with _loss_in_one_sentence(OSError):  # the pipes of a pool; errors of a call are in its future
                pending.append(self.executor.submit(call))
            del call  # and its arrays
            if len(pending) >= self.n_pending:
                yield _result(pending.popleft())
        while pending:
            yield _result(pending.popleft())

    @classmethod
    def of(cls, executor: Executor | None) -> Workers:
        """Return the workers of an executor, with two calls for each; those of this process for None."""
        if executor is None:
            return SERIAL
        client = getattr(executor, "_client", None)  # of dask
        count = getattr(executor, "_max_workers", os.cpu_count()) if client is None else sum(client.nthreads().values())
        return cls(executor, 2 * (count or 1))


def _result(future: Future[R]) -> R:
    with _loss_in_one_sentence():
        return future.result()


SERIAL = Workers(_InThisProcess(), 1)


@contextmanager
def open_executor(cluster: str | None = None, workers: int | None = None) -> Iterator[Executor | None]:
    """Yield the executor of the Dask scheduler at an address, or of so many new processes; None without both.

    The workers of the scheduler need tnlib and dask, and no files. Processes have one thread each; a script needs
    ``if __name__ == "__main__":``, because they import it. `ArgumentError` if both are given, `workers` is below 1, or
    the scheduler does not answer.
    """
    if cluster is not None and workers is not None:
        raise ArgumentError(
            f"compress: workers and cluster exclude each other, got {workers} and {cluster!r}; pass one of them."
        )
    if workers is not None and workers < 1:
        raise ArgumentError(f"compress: workers must be at least 1, got {workers}; pass for example 2.")
    if cluster is not None:
        with _dask_client(cluster) as client:
            yield client.get_executor()
    elif workers is not None:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawned, initializer=_use_one_thread) as pool:
            try:
                yield pool
            except ClusterError:
                # The pool ends its other processes, but not one that was being started: it would wait for it forever.
                for process in list((pool._processes or {}).values()):
                    process.kill()
                raise
    else:
        yield None


def _use_one_thread() -> None:
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    threadpool_limits(1)  # of the libraries that are loaded already


@contextmanager
def _loss_in_one_sentence(*lost: type[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        name = type(problem).__name__
        if not isinstance(problem, (BrokenExecutor, CancelledError, *lost)) and name not in _LOST:
            raise
        raise ClusterError(
            f"compress: workers must stay until the end, got the loss of one ({name}); pass fewer if memory was short, "
            'and call compress below `if __name__ == "__main__":` in a script.'
        ) from None


@contextmanager
def _dask_client(address: str) -> Iterator[Any]:
    names = "dask", "distributed"
    dask, distributed = (import_optional("compress: cluster", name, "'tnlib[cluster]'") for name in names)
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}), ExitStack() as stack:
        try:
            client: Any = stack.enter_context(distributed.Client(address, set_as_default=False))
            client.wait_for_workers(1, timeout=30)
        except (OSError, TimeoutError, ValueError) as problem:
            raise ArgumentError(
                f"compress: cluster must be the address of a Dask scheduler with workers, got {address!r}, which does "
                f"not answer ({type(problem).__name__}); start them by `dask scheduler` and `dask worker`."
            ) from None
        yield client
