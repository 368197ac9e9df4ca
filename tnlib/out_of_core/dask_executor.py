"""Execution of a pass by the workers of a Dask client: delayed tiles, and the sums over their tree.

Dask runs the tasks that a lost worker did once more. All numbers come from the same tiles and the same tree, so they
depend neither on the workers nor on the order in which these are done.
"""

from __future__ import annotations

import functools
import io
import pickle
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tnlib._errors import ArgumentError, ClusterError, FileFormatError
from tnlib._typing import Array
from tnlib.linalg.threads import single_threaded_blas, work_in_one_piece
from tnlib.out_of_core.dask_source import DaskSource
from tnlib.out_of_core.passes import TilePass, TileResult
from tnlib.out_of_core.storage import is_client
from tnlib.out_of_core.tiles import PART, Partial, checked_tile

POLL, _GRACE = 2, 60  # seconds between looks at a silent cluster, and until one without workers is given up


def current_client() -> Any:
    """Return the client that computes Dask collections by default, or None."""
    if "distributed" not in sys.modules:
        return None
    from dask.base import get_scheduler

    client = getattr(get_scheduler(), "__self__", None)
    return client if is_client(client) else None


class DaskExecutor:
    """Runs passes on the workers of a client.

    Parameters
    ----------
    function
        Name for messages.
    client
        Dask client.
    """

    def __init__(self, function: str, client: Any) -> None:
        self._function, self._client = function, client

    def run(self, job: TilePass) -> Iterator[TileResult]:
        """Yield the results of the tiles, in their order; the last one has the sums over all of them."""
        import dask

        results, sums = _delayed_pass(job)
        with self._connected(), dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}):
            futures = self._client.compute([*results, *(total for _, total in sums)])
        levels = [level for level, _ in sums]
        try:
            for k in range(len(results)):
                fingerprint, part = self._result_of(futures[k])
                futures[k] = None  # so that workers drop it
                last = k + 1 == len(results)
                totals = [self._result_of(future) for future in futures[len(results) :]] if last else []
                yield TileResult(fingerprint, part, list(zip(levels, totals, strict=True)) if last else [])
        finally:
            futures.clear()

    def _result_of(self, future: Any) -> Any:
        """Return the result of a future, or raise the error of its task."""
        from distributed import KilledWorker

        with self._connected():
            error = self._error_of(future)
            if error is None:
                return future.result()
            if isinstance(error, KilledWorker):
                raise error
        raise error

    def _error_of(self, future: Any) -> BaseException | None:
        """Return the error of a future, None if it has a result; TimeoutError after a minute without workers."""
        silent_since: float | None = None
        while True:
            try:
                error: BaseException | None = future.exception(timeout=POLL)
            except TimeoutError:
                if self._client.nthreads():
                    silent_since = None
                elif silent_since is None:
                    silent_since = time.monotonic()
                elif time.monotonic() - silent_since > _GRACE:
                    raise TimeoutError("no worker is left") from None
            else:
                return error

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Turn errors of the connection to workers inside the block into one sentence."""
        from concurrent.futures import CancelledError

        from distributed import KilledWorker
        from distributed import client as client_module

        closed = getattr(client_module, "ClosedClientError", CancelledError)  # of newer versions
        workers = str(getattr(self._client.scheduler, "address", "the client"))
        try:
            yield
        except KilledWorker:
            raise ClusterError(
                f"{self._function}: a task must not end its worker, got the end of several workers of {workers} in the "
                "same task; their memory may be too small: lower storage.memory."
            ) from None
        except (CancelledError, closed, OSError) as problem:
            reason = str(problem).rstrip(".") or type(problem).__name__
            raise ClusterError(
                f"{self._function}: the workers of {workers} must stay until the end, got {reason}; start them again, "
                "and repeat the call: it resumes from the folder of storage."
            ) from None


def _delayed_pass(job: TilePass) -> tuple[list[Any], list[tuple[int, Any]]]:
    """Return the delayed results of the tiles, and levels and delayed values of the sums over all of them."""
    from dask import delayed

    # a task of its own: workers send the pass to each other, and it survives their loss
    shared = delayed(_PickledPass, pure=False)(secrets.token_hex(8), _pickled(job))
    run, combine = delayed(_run_tile, nout=2, pure=False), delayed(_combine, pure=False)
    source = job.source if isinstance(job.source, DaskSource) else None
    outputs = [run(shared, k, source and source.chunks_of(job.tiles[k])) for k in range(job.first, len(job.tiles))]
    sums = []
    for level, start in dyadic_ranges(job.first, len(job.tiles)):
        partials = [outputs[k - job.first][1] for k in range(start, start + (1 << level))]
        while len(partials) > 1:
            partials = [combine(shared, a, b) for a, b in zip(partials[::2], partials[1::2], strict=True)]
        sums.append((level, partials[0]))
    return [output[0] for output in outputs], sums


def dyadic_ranges(first: int, last: int) -> list[tuple[int, int]]:
    """Return (level, start) of the largest aligned ranges of 2**level tiles that cover first ... last - 1, in order.

    >>> dyadic_ranges(0, 6)
    [(2, 0), (1, 4)]
    """
    out = []
    while first < last:
        level = (last - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)
        out.append((level, first))
        first += 1 << level
    return out


@dataclass(frozen=True)
class _PickledPass:
    """A pass as bytes, loaded once by every worker."""

    run_id: str
    pickled: bytes

    def __hash__(self) -> int:
        return hash(self.run_id)


@functools.lru_cache(maxsize=1)
def _loaded(shared: _PickledPass) -> TilePass:
    job: TilePass = pickle.loads(shared.pickled)
    return job


@single_threaded_blas
def _run_tile(shared: _PickledPass, k: int, chunks: Any) -> tuple[tuple[float, Array | None], Partial]:
    """Return fingerprint and part of a tile for the caller, and what is summed."""
    job = _loaded(shared)
    tile, source = job.tiles[k], job.source
    with work_in_one_piece():
        a = source.assemble(tile, chunks) if isinstance(source, DaskSource) else source.read(tile)
        data = checked_tile(source, tile, a)
        partial = job.work(data)
    return (data.fingerprint, partial.pop(PART, None)), partial


@single_threaded_blas
def _combine(shared: _PickledPass, a: Partial, b: Partial) -> Partial:
    with work_in_one_piece():
        return _loaded(shared).combine(a, b)


def _pickled(job: TilePass) -> bytes:
    """Return a pass as bytes, in which h5py datasets are opened again; or refuse a source that workers cannot open."""
    import cloudpickle

    source = job.source

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if type(value).__module__.partition(".")[0] == "h5py" and hasattr(value, "file"):
                return _open_hdf5, (source.function, source.parameter, value.file.filename, value.name)
            return super().reducer_override(value)

    out = io.BytesIO()
    try:
        Pickler(out).dump(job)
    except ArgumentError:
        raise
    except (TypeError, AttributeError, ValueError, RecursionError, pickle.PicklingError) as problem:
        raise ArgumentError(
            f"{source.function}: {source.parameter} must be an array that workers can open, got one that cannot be "
            f"pickled ({problem}); pass a file, a zarr array or a dask.array."
        ) from None
    return out.getvalue()


def _open_hdf5(function: str, parameter: str, file: str, name: str) -> Any:
    import h5py

    try:
        return h5py.File(file, "r")[name]
    except (OSError, KeyError) as problem:
        raise FileFormatError(
            f"{function}: {parameter} must be a dataset that all workers can open, got {problem}; place the file on a "
            "shared file system, and close it where it is written."
        ) from None
