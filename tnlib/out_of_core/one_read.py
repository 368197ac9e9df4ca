"""One read of an array, tile by tile, of any storage or from a stream: for sketches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tnlib._array_api import to_host
from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_numbers, is_other_array
from tnlib.linalg.scaling import largest, shift
from tnlib.out_of_core.array_source import ArraySource, Tile, is_sliced
from tnlib.out_of_core.dask_source import source_of
from tnlib.out_of_core.memory_limit import as_memory
from tnlib.out_of_core.progress import notify
from tnlib.out_of_core.slab_stream import SlabStream
from tnlib.out_of_core.tile_data import refuse_infinite_tile
from tnlib.out_of_core.tile_executor import read_ahead
from tnlib.out_of_core.tiling import tiles_of

_DRIFT = 200  # powers of two by which a tile may exceed the first one before all sums are scaled


class OneRead:
    """An array that will be read once, in tiles of any position.

    Parameters
    ----------
    function, parameter
        Names for messages.
    x
        A SlabStream, an array, or anything with `shape`, `dtype` and slicing.
    memory
        The memory limit of the caller.
    """

    def __init__(self, function: str, parameter: str, x: Any, memory: Any) -> None:
        self.function, self._parameter, self.limit = function, parameter, as_memory(function, memory)
        if is_other_array(x):  # copied from its device; the sketches are computed on the host
            x = as_numbers(function, parameter, to_host(x))
        if isinstance(x, SlabStream):
            self._x: SlabStream | ArraySource = x
        else:
            self._x = source_of(function, parameter, x if is_sliced(x) else as_numbers(function, parameter, x))
        self.shape: tuple[int, ...] = self._x.shape
        self.dtype: np.dtype[Any] = self._x.dtype

    def require_legs(self, count: int) -> None:
        """Raise where the array has fewer legs."""
        if len(self.shape) < count:
            raise ArgumentError(
                f"{self.function}: {self._parameter} must have at least {count} legs with one_pass, got shape "
                f"{self.shape}; leave one_pass out."
            )

    def refuse_large(self, *sizes: int) -> None:
        """Raise where sketches of these many numbers exceed half of the memory limit."""
        needed = sum(sizes) * np.result_type(self.dtype, np.float64).itemsize
        if 2 * needed > self.limit.total:
            raise ArgumentError(
                f"{self.function}: memory must be at least {2 * needed:,} bytes for the sketches, got "
                f"{self.limit.total:,}; raise memory or lower max_rank."
            )

    def tiles(self) -> Iterator[tuple[Tile, Array]]:
        """Yield position and entries of every tile, finite."""
        if isinstance(self._x, SlabStream):
            yield from self._x.read(self.function)
            return
        source = self._x
        tiles = tiles_of(source, (), self.limit)
        for k, (tile, a) in enumerate(read_ahead(source, tiles)):
            refuse_infinite_tile(source, tile, a)
            yield tile, a
            notify("pass 1", k + 1, len(tiles))


class LinearSums:
    """Sums that are linear in the array, at a common power of two that follows the largest entry.

    Parameters
    ----------
    sums
        The arrays to which the caller adds the parts of every tile.
    """

    def __init__(self, sums: Sequence[Array]) -> None:
        self._sums = sums
        self.exponent: int | None = None  # of the sums, None before the first entry that is not zero
        self.square = 0.0  # sum of squares of the array at that scale

    def scaled(self, a: Array) -> Array | None:
        """Return a tile in double precision, multiplied by 2**-exponent; None where it is zero."""
        top = largest(a)
        if top == 0.0:
            return None
        e = int(np.frexp(top)[1])
        if self.exponent is None or e > self.exponent + _DRIFT:
            self._set_exponent(e)
        wide = a.astype(np.result_type(a.dtype, np.float64), copy=False)
        scaled = shift(wide, -(self.exponent or 0))
        self.square += float(np.vdot(scaled, scaled).real)
        return scaled

    def normalize(self) -> None:
        """Scale all sums so that the norm of the array lies in [1/2, 1): results fit in single precision."""
        if self.exponent is not None:
            self._set_exponent(self.exponent + math.frexp(math.sqrt(self.square))[1])

    def _set_exponent(self, e: int) -> None:
        if self.exponent is not None:
            for total in self._sums:
                total[...] = shift(total, self.exponent - e)
            self.square = math.ldexp(self.square, 2 * (self.exponent - e))
        self.exponent = e
