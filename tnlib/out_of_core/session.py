"""The choice between memory and passes, and the passes over one array with their limit and their spill folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError
from tnlib.out_of_core.array_source import ArraySource, is_sliced, open_source
from tnlib.out_of_core.cluster_connection import as_client
from tnlib.out_of_core.dask_executor import DaskExecutor
from tnlib.out_of_core.dask_source import DaskSource, is_dask_array, source_of
from tnlib.out_of_core.memory_limit import MemoryLimit, as_memory
from tnlib.out_of_core.spill import Spill
from tnlib.out_of_core.tile_passes import Passes

Session: TypeAlias = AbstractContextManager[tuple[Passes, ArraySource]]


class Resources(NamedTuple):
    """Memory, spill folder and client of a call, not yet checked."""

    memory: Any
    spill: Any
    client: Any = None


def open_session(
    function: str, parameter: str, x: Any, resources: Resources, options: Mapping[str, Any]
) -> tuple[Session | None, Any]:
    """Return the passes over `x` and its source, as a context; or None and the array to decompose in memory.

    Arrays in memory are read by tiles only if the caller passes `memory`, Dask arrays on a cluster if they exceed a
    tile, anything else if it exceeds the limit. `options` are the other arguments of the call, as JSON.
    """
    client = as_client(function, x, resources.client)
    if client is not None:
        return _session_on_workers(_source_on_workers(function, parameter, x, client), client, resources, options)
    if type(x) is np.ndarray and resources.memory is None:
        return None, x
    limit = as_memory(function, resources.memory)
    if not isinstance(x, np.ndarray) and not is_sliced(x):
        return None, x
    source = source_of(function, parameter, x)
    if limit.holds(source.nbytes):
        return None, x
    return _session(source, limit, resources, options, None), x


def _session_on_workers(
    source: ArraySource, client: Any, resources: Resources, options: Mapping[str, Any]
) -> tuple[Session | None, Any]:
    limit = as_memory(source.function, resources.memory, for_workers=True)
    if source.nbytes <= limit.tile:
        return None, source.read_all()
    return _session(source, limit, resources, options, client), None


def _source_on_workers(function: str, parameter: str, x: Any, client: Any) -> ArraySource:
    if is_dask_array(x):
        return DaskSource(function, parameter, x, client)
    if not is_sliced(x):
        raise ArgumentError(
            f"{function}: {parameter} must be an array that workers can read, got a {type(x).__name__} in memory; "
            "leave client out, or pass a file, a zarr array or a dask.array."
        )
    source = open_source(function, parameter, x)
    source.on_workers = True
    return source


@contextmanager
def _session(
    source: ArraySource, limit: MemoryLimit, resources: Resources, options: Mapping[str, Any], client: Any
) -> Iterator[tuple[Passes, ArraySource]]:
    sizes = {"memory": limit.total, "tile": limit.tile}
    call = {"function": source.function, "array": source.identity(), **sizes, **options}
    with Spill(source.function, resources.spill, call) as files:
        workers = None if client is None else DaskExecutor(source.function, client)
        yield Passes(limit, files, workers), source
