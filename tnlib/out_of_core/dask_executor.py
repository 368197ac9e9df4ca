"""Execution of a pass by the workers of a Dask cluster: one graph of tiles and of the sums over their tree.

Dask runs the tasks that a lost worker did once more. All numbers come from the same tiles and the same tree, so they
depend neither on the workers nor on the order in which these are done.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

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
                futures[k] = None  # workers may forget it
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
    graph: dict[Any, Any] = {}
    if isinstance(own.source, DaskSource):
        graph |= own.source.chunk_graph()[0]
    graph[shared] = (pickle.loads, pickled_pass(own))
    numbers = range(own.first, len(own.tiles))
    for k in numbers:
        chunks = [own.source.keys_of(own.tiles[k])] if isinstance(own.source, DaskSource) else []
        graph[tile, k] = (partial(_run_tile, k), shared, *chunks)
        graph[result, k] = (_first, (tile, k))
        graph[total, 0, k] = (_second, (tile, k))
    sums = dyadic_ranges(own.first, len(own.tiles))
    for height, start in sums:
        for level in range(1, height + 1):
            for k in range(start, start + (1 << height), 1 << level):
                halves = (total, level - 1, k), (total, level - 1, k + (1 << level - 1))
                graph[total, level, k] = (partial(_combine, own.combine), *halves)
    return graph, [(result, k) for k in numbers], [(level, (total, level, start)) for level, start in sums]


@single_threaded_blas
def _run_tile(k: int, own: TilePass, chunks: Any = None) -> tuple[tuple[float, Array | None], Partial]:
    """Return the fingerprint of a tile with the part for the caller, and what is summed."""
    tile = own.tiles[k]
    with work_in_one_piece():
        a = own.source.read(tile) if chunks is None else own.source.assemble(tile, chunks)  # type: ignore[attr-defined]
        data = checked_tile(own.source, tile, a)
        summed = own.work(data)
    return (data.fingerprint, summed.pop(PART, None)), summed


@single_threaded_blas
def _combine(combine: Combine, a: Partial, b: Partial) -> Partial:
    with work_in_one_piece():
        return combine(a, b)


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _second(pair: tuple[Any, Any]) -> Any:
    return pair[1]
