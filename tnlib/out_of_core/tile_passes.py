"""Passes over an array: one function for every tile, and the sum of its results over a fixed tree.

A tile is read while the one before it is in work. Its result is a dictionary of arrays. Results are combined pairwise,
those of neighbouring tiles first, so that the order of the sums depends on the tiles alone and not on the workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib._validate import refuse_infinite
from tnlib.linalg.scaling import exponent_of, shift, squares
from tnlib.out_of_core.array_source import ArraySource, Tile, open_source
from tnlib.out_of_core.memory_limit import MemoryLimit
from tnlib.out_of_core.progress import notify
from tnlib.out_of_core.spill import Spill, release_pages
from tnlib.out_of_core.tiling import tiles_of

Partial: TypeAlias = dict[str, Array]

_SAFE_NORMS = (1e-100, 1e100)  # of tiles: sums of squares, and their products with small numbers, stay in range
_CHECKPOINT = 64  # tiles


class TileData(NamedTuple):
    """A tile in memory: the entries of the array are `array * 2**exponent`."""

    tile: Tile
    array: Array
    exponent: int
    square: float  # sum of squares of `array`


Work: TypeAlias = Callable[[TileData], Partial]
Combine: TypeAlias = Callable[[Partial, Partial], Partial]


class Passes:
    """Runs passes within a memory limit, and holds the arrays that they leave.

    Parameters
    ----------
    limit
        The memory that all of it may take.
    spill
        Where arrays are stored that do not fit, and the state of the passes.
    """

    def __init__(self, limit: MemoryLimit, spill: Spill) -> None:
        self.limit, self._spill = limit, spill
        self._n_passes = 0
        self._n_arrays = 0
        self._squares: dict[tuple[ArraySource, int, Tile], float] = {}  # of the tiles read so far

    def tiles(self, source: ArraySource, whole: Sequence[int]) -> list[Tile]:
        """Return the tiles of a source with some axes whole, or refuse an array whose tiles do not fit."""
        tiles = tiles_of(source, whole, self.limit.tile, self.limit.total // 6)
        if tiles is None:
            needed = 6 * math.prod(source.shape[a] for a in whole) * source.dtype.itemsize
            raise ArgumentError(
                f"{source.function}: memory must be at least {needed:,} bytes for legs {tuple(whole)} of an array of "
                f"shape {source.shape}, got {self.limit.total:,}; raise memory or split these legs."
            )
        return tiles

    def reduce(self, source: ArraySource, tiles: Sequence[Tile], work: Work, combine: Combine) -> Partial:
        """Return the combination of `work` of all tiles; a pass that an earlier run has finished is not repeated."""
        name = str(self._n_passes)
        self._n_passes += 1
        done, sums = self._resume(name)
        if done < len(tiles):
            for data in self._read(source, tiles[done:]):
                _push(sums, work(data), combine)
                done += 1
                notify(f"pass {int(name) + 1}", done, len(tiles))
                if self._spill.is_resumable and (done % _CHECKPOINT == 0 or done == len(tiles)):
                    self._spill.store(name, _as_arrays(done, sums))
        total = sums[-1][1]
        for _, partial in reversed(sums[:-1]):
            total = combine(partial, total)
        return total

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array that a pass fills: in memory where it fits and need not survive, else in the spill folder."""
        self._n_arrays += 1
        if math.prod(shape) * dtype.itemsize <= self.limit.array and not self._spill.is_resumable:
            return np.empty(shape, dtype)
        return self._spill.array(str(self._n_arrays), shape, dtype)

    def as_source(self, source: ArraySource, a: Array) -> ArraySource:
        """Return an array of `new_array`, made from `source`, as the source of the next pass."""
        return open_source(source.function, source.parameter, a)

    def discard(self, a: Array) -> None:
        """Remove the file of an array of `new_array` that is no longer needed."""
        if isinstance(a, np.memmap):
            name = str(a.filename).rpartition("array-")[2].removesuffix(".bin")
            self._spill.remove(name)

    def _resume(self, name: str) -> tuple[int, list[tuple[int, Partial]]]:
        stored = self._spill.load(name)
        return (0, []) if stored is None else _from_arrays(stored)

    def _read(self, source: ArraySource, tiles: Sequence[Tile]) -> Iterator[TileData]:
        """Yield the tiles, the next one being read meanwhile."""
        with ThreadPoolExecutor(1, "tnlib-read") as reader:
            upcoming = reader.submit(source.read, tiles[0])
            for k, tile in enumerate(tiles):
                a = upcoming.result()
                if k + 1 < len(tiles):
                    upcoming = reader.submit(source.read, tiles[k + 1])
                yield self._checked(source, tile, a)

    def _checked(self, source: ArraySource, tile: Tile, a: Array) -> TileData:
        """Return a tile that is finite, the same as in earlier passes, and whose squares are in range."""
        square = squares(np.ravel(a, "K"))
        if self._squares.setdefault((source, source.exponent, tile), square) != square and not math.isnan(square):
            raise FileFormatError(
                f"{source.function}: {source.parameter} must not change during the decomposition, got other numbers in "
                f"{_words(tile)} than before; copy it first."
            )
        exponent = 0
        if not math.isfinite(square) or not _SAFE_NORMS[0] < math.sqrt(square) < _SAFE_NORMS[1]:
            refuse_infinite_tile(source, tile, a)
            exponent = exponent_of(a)
            a = shift(a, -exponent)
            square = squares(np.ravel(a, "K"))
        return TileData(tile, a, exponent, square)


def write_tile(out: Array, index: tuple[slice, ...], values: Array) -> None:
    """Assign a part of an array of `Passes.new_array`, which takes no memory if it is mapped."""
    out[index] = values
    release_pages(out)


def refuse_infinite_tile(source: ArraySource, tile: Tile, a: Array) -> None:
    """Raise where a tile holds NaN or inf, and name the tile and the index of the first one in it."""
    if np.isfinite(a).all():
        return
    try:
        refuse_infinite(source.function, source.parameter, a)
    except ArgumentError as problem:
        raise ArgumentError(f"{str(problem).partition(';')[0]} of {_words(tile)}; replace NaN and inf first.") from None


def _words(tile: Tile) -> str:
    return "the chunk [" + ", ".join(f"{start}:{stop}" for start, stop in tile) + "]"


def _push(sums: list[tuple[int, Partial]], partial: Partial, combine: Combine) -> None:
    """Add a result to sums of 1, 2, 4, ... neighbouring tiles, the longest first: a carry as in binary numbers."""
    level = 0
    while sums and sums[-1][0] == level:
        partial = combine(sums.pop()[1], partial)
        level += 1
    sums.append((level, partial))


def _as_arrays(done: int, sums: Sequence[tuple[int, Partial]]) -> dict[str, Array]:
    arrays = {f"{k}.{key}": a for k, (_, partial) in enumerate(sums) for key, a in partial.items()}
    return {"done": np.array(done), "levels": np.array([level for level, _ in sums]), **arrays}


def _from_arrays(stored: dict[str, Array]) -> tuple[int, list[tuple[int, Partial]]]:
    partials: list[Partial] = [{} for _ in stored["levels"]]
    for name, a in stored.items():
        k, _, key = name.partition(".")
        if key:
            partials[int(k)][key] = a
    return int(stored["done"]), list(zip(stored["levels"].tolist(), partials, strict=True))
