"""Dask clients: the one that computes an array, and the loss of its workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tnlib._errors import ArgumentError, ArgumentTypeError, ClusterError
from tnlib.out_of_core.dask_source import is_dask_array

POLL, _GRACE = 2, 60  # seconds between looks at a silent cluster, and until one without workers is given up


def as_client(function: str, x: Any, client: Any) -> Any:
    """Return the client that computes `x`: the one passed, the one that `x.compute()` would use, or None."""
    if client is None:
        return _client_of_dask() if is_dask_array(x) else None
    if not _is_client(client):
        raise ArgumentTypeError(
            f"{function}: client must be a distributed.Client, got a {type(client).__name__}; pass for example "
            "distributed.Client('tcp://10.0.0.1:8786')."
        )
    if client.asynchronous:
        raise ArgumentError(
            f"{function}: client must be synchronous, got one of an event loop; open it without asynchronous=True."
        )
    return client


def _client_of_dask() -> Any:
    if "distributed" not in sys.modules:
        return None
    from dask.base import get_scheduler

    client = getattr(get_scheduler(), "__self__", None)
    return client if _is_client(client) else None


def _is_client(value: Any) -> bool:
    if "distributed" not in sys.modules:  # then nobody can have one
        return False
    from distributed import Client

    return isinstance(value, Client)


@contextmanager
def connected(function: str, workers: str, *, memory: str, advice: str) -> Iterator[None]:
    """Turn errors of the connection to workers inside the block into one sentence.

    Parameters
    ----------
    function, workers
        Name of the caller's function, and of the workers.
    memory
        What to do about too little memory.
    advice
        What to do about the loss of all workers.
    """
    from concurrent.futures import CancelledError

    from distributed import KilledWorker
    from distributed import client as client_module

    closed = getattr(client_module, "ClosedClientError", CancelledError)  # of newer versions
    try:
        yield
    except KilledWorker:
        raise ClusterError(
            f"{function}: a task must not end its worker, got the end of several workers of {workers} in the same "
            f"task; their memory may be too small: {memory}."
        ) from None
    except (CancelledError, closed, OSError) as problem:
        reason = str(problem).rstrip(".") or type(problem).__name__
        raise ClusterError(
            f"{function}: the workers of {workers} must stay until the end, got {reason}; {advice}."
        ) from None


class Patience:
    """Waits for a client, and raises TimeoutError when it has had no workers for a minute."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._silent_since: float | None = None

    def error_of(self, future: Any) -> BaseException | None:
        """Return the error of a future, None if it has a result."""
        while True:
            try:
                error: BaseException | None = future.exception(timeout=POLL)
            except TimeoutError:
                self.check()
            else:
                return error

    def check(self) -> None:
        """Raise if there are no workers, and have not been for a minute."""
        if self._client.nthreads():
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        elif time.monotonic() - self._silent_since > _GRACE:
            raise TimeoutError("no worker is left")
