"""The choice between memory, passes over an array, and one read of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._validate import is_stored
from tnlib.out_of_core.array_source import ArraySource
from tnlib.out_of_core.dask_executor import DaskExecutor, current_client
from tnlib.out_of_core.dask_source import is_dask_array, source_of
from tnlib.out_of_core.one_read import OneRead, SlabStream
from tnlib.out_of_core.passes import Passes
from tnlib.out_of_core.run_folder import RunFolder
from tnlib.out_of_core.storage import Storage, as_storage


def open_array(
    function: str, parameter: str, x: Any, storage: Storage | None, call: Mapping[str, Any]
) -> tuple[Passes | OneRead | None, Any]:
    """Return the passes over `x`, or its one read; or None and the array to decompose in memory.

    `call` has the other arguments of the call, as JSON.
    """
    checked = as_storage(function, storage)
    if isinstance(x, SlabStream):
        checked = dataclasses.replace(checked, one_pass=True)
    if checked.one_pass:
        return OneRead(function, parameter, x, checked.limit()), None
    return open_passes(function, parameter, x, checked, call)


def open_passes(
    function: str, parameter: str, x: Any, storage: Storage | None, call: Mapping[str, Any]
) -> tuple[Passes | None, Any]:
    """Return the passes over `x`; or None and the array to decompose in memory.

    Arrays in memory are read by tiles only if the caller passes a limit, Dask arrays on a cluster if they exceed a
    tile, anything else if it exceeds the limit.
    """
    checked = as_storage(function, storage)
    if checked.one_pass or isinstance(x, SlabStream):
        cause = "a SlabStream" if isinstance(x, SlabStream) else "storage.one_pass=True"
        raise ArgumentTypeError(
            f"{function}: {parameter} must be an array that can be read twice, got {cause}; tt_svd, tucker and svd can "
            "read an array once."
        )
    client = checked.client
    if client is None and is_dask_array(x):
        client = current_client()
    if client is not None:
        source, limit = _source_on_workers(function, parameter, x, client), checked.limit(for_workers=True)
        if source.nbytes <= limit.tile:
            return None, source.read_all()
    else:
        if not is_stored(x) and (checked.memory is None or not isinstance(x, np.ndarray)):
            return None, x
        source, limit = source_of(function, parameter, x), checked.limit()
        if limit.holds(source.nbytes):
            return None, x if isinstance(x, np.ndarray) else source.read_all()
    sizes = {"memory": limit.total, "tile": limit.tile}
    request = {"function": function, "array": source.identity(), **sizes, **call}
    workers = None if client is None else DaskExecutor(function, client).run
    return Passes(source, limit, RunFolder(function, checked.folder, request), workers), x


def _source_on_workers(function: str, parameter: str, x: Any, client: Any) -> ArraySource:
    if not is_stored(x):
        raise ArgumentError(
            f"{function}: {parameter} must be an array that workers can read, got a {type(x).__name__} in memory; "
            "leave client out, or pass a file, a zarr array or a dask.array."
        )
    source = source_of(function, parameter, x, client)
    source.on_workers = True
    return source
