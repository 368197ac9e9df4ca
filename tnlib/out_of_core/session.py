"""The choice between memory and passes, and the passes over one array with their limit and their spill folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from tnlib.out_of_core.array_source import ArraySource, is_sliced, open_source
from tnlib.out_of_core.memory_limit import MemoryLimit, as_memory
from tnlib.out_of_core.spill import Spill
from tnlib.out_of_core.tile_passes import Passes


def open_session(
    function: str, parameter: str, x: Any, memory: Any, spill: Any, options: Mapping[str, Any]
) -> AbstractContextManager[tuple[Passes, ArraySource]] | None:
    """Return the passes over `x` and its source, as a context; None where `x` is to be decomposed in memory.

    Arrays in memory are read by tiles only if the caller passes `memory`, anything else if it exceeds the limit.
    `options` are the other arguments of the call, as JSON.
    """
    if type(x) is np.ndarray and memory is None:
        return None
    limit = as_memory(function, memory)
    if not isinstance(x, np.ndarray) and not is_sliced(x):
        return None
    source = open_source(function, parameter, x)
    return None if limit.holds(source.nbytes) else _session(source, limit, spill, options)


@contextmanager
def _session(
    source: ArraySource, limit: MemoryLimit, spill: Any, options: Mapping[str, Any]
) -> Iterator[tuple[Passes, ArraySource]]:
    call = {"function": source.function, "array": source.identity(), "memory": limit.total, **options}
    with Spill(source.function, spill, call) as files:
        yield Passes(limit, files), source
