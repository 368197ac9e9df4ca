"""Passes over an array: one function for every tile, and the sum of its results over a fixed tree.

The result of a tile is a dictionary of arrays. Those of neighbouring tiles are added first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tnlib._errors import FileFormatError
from tnlib._typing import Array
from tnlib.out_of_core.array_source import ArraySource, Tile, open_source
from tnlib.out_of_core.memory_limit import MemoryLimit
from tnlib.out_of_core.progress import notify
from tnlib.out_of_core.spill import Spill, release_pages
from tnlib.out_of_core.tile_data import Combine, Partial, Work, words_of
from tnlib.out_of_core.tile_executor import SerialExecutor, TileExecutor, TilePass
from tnlib.out_of_core.tiling import tiles_of
from tnlib.out_of_core.tree_sum import TreeSum

_CHECKPOINT = 64  # tiles


class Passes:
    """Runs passes within a memory limit, and holds the arrays that they leave.

    Parameters
    ----------
    limit
        The memory that all of it may take.
    spill
        Where arrays are stored that do not fit, and the state of the passes.
    workers
        Runs the passes over sources that workers read; None where there are none.
    """

    def __init__(self, limit: MemoryLimit, spill: Spill, workers: TileExecutor | None = None) -> None:
        self.limit, self._spill, self._workers = limit, spill, workers
        self._n_passes = 0
        self._n_arrays = 0
        self._fingerprints: dict[tuple[ArraySource, int, Tile], float] = {}  # of the tiles read so far

    def tiles(self, source: ArraySource, whole: Sequence[int]) -> list[Tile]:
        """Return the tiles of a source with some axes whole, or refuse an array whose tiles do not fit."""
        return tiles_of(source, whole, self.limit)

    def reduce(
        self,
        source: ArraySource,
        tiles: Sequence[Tile],
        work: Work,
        combine: Combine,
        store: Callable[[Tile, Array], None] | None = None,
    ) -> Partial:
        """Return the combination of `work` of all tiles; a pass that an earlier run has finished is not repeated.

        `store` is called here with every tile and the entry `PART` of its result.
        """
        name = str(self._n_passes)
        self._n_passes += 1
        stored = self._spill.load(name)
        total = TreeSum() if stored is None else TreeSum.from_arrays(stored)
        done = total.count
        executor = self._workers if source.on_workers and self._workers is not None else SerialExecutor()
        results = executor.run(TilePass(source, tiles, work, combine, done)) if done < len(tiles) else ()
        for result in results:
            self._refuse_changes(source, tiles[done], result.fingerprint)
            if store is not None and result.part is not None:
                store(tiles[done], result.part)
            for level, partial in result.sums:
                total.add(level, partial, combine)
            done += 1
            notify(f"pass {int(name) + 1}", done, len(tiles))
            if self._spill.is_resumable and total.count == done and (done % _CHECKPOINT == 0 or done == len(tiles)):
                self._spill.store(name, total.as_arrays())
        return total.total(combine)

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

    def _refuse_changes(self, source: ArraySource, tile: Tile, fingerprint: float) -> None:
        known = self._fingerprints.setdefault((source, source.exponent, tile), fingerprint)
        if known != fingerprint and not math.isnan(fingerprint):
            raise FileFormatError(
                f"{source.function}: {source.parameter} must not change during the decomposition, got other numbers in "
                f"{words_of(tile)} than before; copy it first."
            )


def write_tile(out: Array, index: tuple[slice, ...], values: Array) -> None:
    """Assign a part of an array of `Passes.new_array`, which takes no memory if it is mapped."""
    out[index] = values
    release_pages(out)
