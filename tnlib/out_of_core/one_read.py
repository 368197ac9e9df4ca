"""Arrays that are read once: streams of slabs, and arrays of any storage tile by tile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tnlib._array_api import to_host
from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_numbers, as_sizes, is_other_array, is_stored, refuse_infinite, to_numpy
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.dask_source import source_of
from tnlib.out_of_core.passes import notify, read_ahead
from tnlib.out_of_core.storage import MemoryLimit
from tnlib.out_of_core.tiles import refuse_infinite_tile, tiles_of


class SlabStream:
    """An array that arrives as slabs along its first leg, for decompositions that read an array once.

    Parameters
    ----------
    slabs
        Arrays (k, n[1], ..., n[d-1]) with any number k of rows each, in order: a list, a generator, any iterable. It is
        consumed once, and no slab is kept.
    shape
        (n[0], ..., n[d-1]), the shape of the whole array.
    dtype
        Dtype of the whole array, of numpy; slabs may have any dtype that converts to it without loss.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> i = np.arange(30.0)
    >>> rows = (np.sin(row + i[:, None] + i)[None] for row in range(20))
    >>> stream = tnlib.SlabStream(rows, (20, 30, 30), float)
    >>> tnlib.tt_svd(stream, max_rank=4, rtol=1e-8).value.ranks
    (1, 2, 2, 1)
    """

    def __init__(self, slabs: Iterable[Any], shape: Sequence[int], dtype: Any) -> None:
        if not isinstance(slabs, Iterable):
            raise ArgumentTypeError(
                f"SlabStream: slabs must be an iterable of arrays, got a {type(slabs).__name__}; pass a generator."
            )
        self.shape = as_sizes("SlabStream", "shape", shape)
        self.dtype = _as_native_dtype(dtype)
        self._slabs: Iterator[Any] | None = iter(slabs)

    def __repr__(self) -> str:
        return f"SlabStream(shape {self.shape}, {self.dtype}{', read' if self._slabs is None else ''})"

    def read_slabs(self, function: str) -> Iterator[tuple[Tile, Array]]:
        """Yield the position and the entries of every slab with rows, finite."""
        if self._slabs is None:
            raise ArgumentError(f"{function}: a SlabStream must not have been read before, got {self!r}; make it anew.")
        slabs, self._slabs = self._slabs, None
        start = 0
        for k, slab in enumerate(slabs):
            a = self._checked(function, k, slab, start)
            if len(a):
                refuse_infinite(function, f"slab {k}", a)
                yield ((start, start + len(a)), *((0, n) for n in self.shape[1:])), a
            start += len(a)
        if start < self.shape[0]:
            raise ArgumentError(
                f"{function}: the slabs must have {self.shape[0]} rows together, got {start}; the stream ended early."
            )

    def _checked(self, function: str, k: int, slab: Any, start: int) -> Array:
        """Return a slab, possibly without rows, if its shape and dtype fit."""
        a = to_numpy(function, f"slab {k}", slab)
        if a.ndim != len(self.shape) or a.shape[1:] != self.shape[1:]:
            expected = ", ".join(("k", *map(str, self.shape[1:])))
            raise ArgumentError(
                f"{function}: slab {k} must have shape ({expected}) with any number k of rows, got {a.shape}; reshape "
                "it first."
            )
        if start + len(a) > self.shape[0]:
            raise ArgumentError(
                f"{function}: the slabs must have {self.shape[0]} rows together, got {start + len(a)} up to slab {k}; "
                "correct the shape of the SlabStream."
            )
        if len(a) == 0:
            return a
        if a.dtype.kind in "biufc" and not np.can_cast(a.dtype, self.dtype, "safe"):
            raise ArgumentTypeError(
                f"{function}: slab {k} must have a dtype that converts to {self.dtype} without loss, got {a.dtype}; "
                "convert it, or state another dtype of the SlabStream."
            )
        return as_numbers(function, f"slab {k}", a)


def _as_native_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which an array of `dtype` is decomposed."""
    try:
        entry = np.zeros(1, dtype)
    except TypeError:
        raise ArgumentTypeError(
            f"SlabStream: dtype must be a dtype of numpy, got {dtype!r}; pass for example numpy.float64."
        ) from None
    native: np.dtype[Any] = as_numbers("SlabStream", "dtype", entry).dtype
    return native


class OneRead:
    """An array that will be read once, in tiles of any position.

    Parameters
    ----------
    function, parameter
        Names for messages.
    x
        A SlabStream, an array, or anything with `shape`, `dtype` and slicing.
    limit
        The memory limit of tiles and sketches.
    """

    def __init__(self, function: str, parameter: str, x: Any, limit: MemoryLimit) -> None:
        self.function, self._parameter, self._limit = function, parameter, limit
        if is_other_array(x):  # copied from its device; the sketches are computed on the host
            x = as_numbers(function, parameter, to_host(x))
        if isinstance(x, SlabStream):
            self._x: SlabStream | ArraySource = x
        else:
            self._x = source_of(function, parameter, x if is_stored(x) else as_numbers(function, parameter, x))
        self.shape: tuple[int, ...] = self._x.shape
        self.dtype: np.dtype[Any] = self._x.dtype

    def require_legs(self, count: int) -> None:
        """Raise where the array has fewer legs."""
        if len(self.shape) < count:
            raise ArgumentError(
                f"{self.function}: {self._parameter} must have at least {count} legs to be read once, got shape "
                f"{self.shape}; leave storage.one_pass out."
            )

    def refuse_large(self, *sizes: int) -> None:
        """Raise where sketches of these many numbers exceed half of the memory limit."""
        needed = sum(sizes) * np.result_type(self.dtype, np.float64).itemsize
        if 2 * needed > self._limit.total:
            raise ArgumentError(
                f"{self.function}: storage.memory must be at least {2 * needed:,} bytes for the sketches, got "
                f"{self._limit.total:,}; raise it, or lower max_rank."
            )

    def tiles(self) -> Iterator[tuple[Tile, Array]]:
        """Yield position and entries of every tile, finite."""
        if isinstance(self._x, SlabStream):
            yield from self._x.read_slabs(self.function)
            return
        source = self._x
        tiles = tiles_of(source, (), self._limit)
        for k, (tile, a) in enumerate(read_ahead(source, tiles)):
            refuse_infinite_tile(source, tile, a)
            yield tile, a
            notify("pass 1", k + 1, len(tiles))
