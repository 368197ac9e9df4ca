"""Execution of a pass by the workers of a Dask cluster: one graph of tiles and of the sums over their tree.

Dask runs the tasks that a lost worker did once more. All numbers come from the same tiles and the same tree, so they
depend neither on the workers nor on the order in which these are done.
"""

from __future__ import annotations

import functools
import pickle
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from tnlib._typing import Array
from tnlib.linalg.threads import single_threaded_blas, work_in_one_piece
from tnlib.out_of_core.cluster_connection import Patience, connected
from tnlib.out_of_core.dask_source import DaskSource
from tnlib.out_of_core.tile_data import PART, Combine, Partial, checked_tile
from tnlib.out_of_core.tile_executor import TilePass, TileResult
from tnlib.out_of_core.tree_sum import dyadic_ranges
from tnlib.out_of_core.worker_pickling import pickled_pass


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

    def run(self, own: TilePass) -> Iterator[TileResult]:
        """Yield the results of the tiles, in their order; the last one has the sums over all of them."""
        graph, results, sums = _graph_of(own)
        futures = self._submit(graph, [*results, *(name for _, name in sums)])
        try:
            for k, future in enumerate(futures[: len(results)]):
                fingerprint, part = self._result_of(future)
                futures[k] = None  # so that workers drop it
                totals = []
                if k + 1 == len(results):
                    own_sums = zip(sums, futures[len(results) :], strict=True)
                    totals = [(level, self._result_of(future)) for (level, _), future in own_sums]
                yield TileResult(fingerprint, part, totals)
        finally:
            futures.clear()

    def _submit(self, graph: dict[Any, Any], names: list[Any]) -> list[Any]:
        import dask

        # The bases of a projection are part of the graph, so that they survive the workers.
        with self._connected(), dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}):
            return list(self._client.get(graph, names, sync=False))

    def _result_of(self, future: Any) -> Any:
        """Return the result of a future, or raise the error of its task."""
        from distributed import KilledWorker

        with self._connected():
            error = Patience(self._client).error_of(future)
            if error is None:
                return future.result()
            if isinstance(error, KilledWorker):
                raise error
        raise error

    def _connected(self) -> Any:
        workers = str(getattr(self._client.scheduler, "address", "the client"))
        advice = "start them again, and repeat the call: it resumes from a folder of spill"
        return connected(self._function, workers, memory="pass a smaller memory=", advice=advice)


def _graph_of(own: TilePass) -> tuple[dict[Any, Any], list[Any], list[tuple[int, Any]]]:
    """Return the graph of a pass, the keys of the results of its tiles, and levels and keys of its sums."""
    run_id = secrets.token_hex(8)
    shared, tile, result, total = (f"tnlib-{word}-{run_id}" for word in ("pass", "tile", "result", "sum"))
    source = own.source if isinstance(own.source, DaskSource) else None
    graph: dict[Any, Any] = {} if source is None else dict(source.chunk_graph()[0])
    graph[shared] = (_itself, _PickledPass(run_id, pickled_pass(own)))
    numbers = range(own.first, len(own.tiles))
    for k in numbers:
        chunks = [] if source is None else [source.keys_of(own.tiles[k])]
        graph[tile, k] = (partial(_run_tile, k), shared, *chunks)
        graph[result, k] = (itemgetter(0), (tile, k))
    sums = []
    for height, start in dyadic_ranges(own.first, len(own.tiles)):
        keys: list[Any] = [(tile, k) for k in range(start, start + (1 << height))]
        for level in range(height):
            names = [(total, level, start, k) for k in range(len(keys) // 2)]
            graph |= {name: (partial(_combine, own.combine), *keys[2 * k : 2 * k + 2]) for k, name in enumerate(names)}
            keys = names
        graph[total, start] = (_summed, keys[0])
        sums.append((height, (total, start)))
    return graph, [(result, k) for k in numbers], sums


@dataclass(frozen=True)
class _PickledPass:
    """A pass as bytes: workers send it to each other, and Dask need not hash it to name the graph."""

    run_id: str
    pickled: bytes = field(compare=False)

    def __dask_tokenize__(self) -> str:
        return self.run_id


@functools.lru_cache(maxsize=1)
def _loaded(own: _PickledPass) -> TilePass:
    out: TilePass = pickle.loads(own.pickled)
    return out


def _itself(own: _PickledPass) -> _PickledPass:
    return own


class _TileOutput(NamedTuple):
    """Fingerprint and part of a tile for the caller, and what is summed."""

    result: tuple[float, Array | None]
    summed: Partial


@single_threaded_blas
def _run_tile(k: int, pickled: _PickledPass, chunks: Any = None) -> _TileOutput:
    own = _loaded(pickled)
    tile, source = own.tiles[k], own.source
    with work_in_one_piece():
        a = source.assemble(tile, chunks) if isinstance(source, DaskSource) else source.read(tile)
        data = checked_tile(source, tile, a)
        summed = own.work(data)
    return _TileOutput((data.fingerprint, summed.pop(PART, None)), summed)


def _summed(value: _TileOutput | Partial) -> Partial:
    return value.summed if isinstance(value, _TileOutput) else value


@single_threaded_blas
def _combine(combine: Combine, a: _TileOutput | Partial, b: _TileOutput | Partial) -> Partial:
    with work_in_one_piece():
        return combine(_summed(a), _summed(b))
