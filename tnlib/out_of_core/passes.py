"""Passes over an array: one function for every tile, and the sum of its results over a fixed tree.

The result of a tile is a dictionary of arrays. Sums are those of a binary tree over the tiles, so they depend on the
tiles alone, and not on the process that adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from tnlib._errors import FileFormatError
from tnlib._typing import Array
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.mapped_file import open_source
from tnlib.out_of_core.run_folder import RunFolder, WrittenArray, release_pages
from tnlib.out_of_core.storage import MemoryLimit
from tnlib.out_of_core.tiles import PART, Combine, Partial, Work, checked_tile, tiles_of, words_of

Observer: TypeAlias = Callable[[str, int, int], None]  # pass, tiles done, tiles in total

_OBSERVER: ContextVar[Observer | None] = ContextVar("tnlib.out_of_core.observer", default=None)
_CHECKPOINT = 64  # tiles between two states that are stored


@contextmanager
def observed_passes(observer: Observer) -> Iterator[None]:
    """Call `observer` after every tile that decompositions read inside the block."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def notify(stage: str, done: int, total: int) -> None:
    """Call the observer, if there is one."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer(stage, done, total)


@dataclass(frozen=True)
class TilePass:
    """One function for the tiles of a source from `first` on, and the sum of its results."""

    source: ArraySource
    tiles: Sequence[Tile]  # all of the pass
    work: Work  # function of a tile in memory. It may be run in another process, and twice
    combine: Combine  # function that adds two results
    first: int = 0  # number of the first tile that is not done


class TileResult(NamedTuple):
    """A tile that is done: its part for the caller, and the sums over 2**level tiles that it completes."""

    fingerprint: float
    part: Array | None
    sums: Sequence[tuple[int, Partial]]


Executor: TypeAlias = Callable[[TilePass], Iterator[TileResult]]  # yields the results of the tiles, in their order


def run_serially(job: TilePass) -> Iterator[TileResult]:
    """Run a pass in this process: one tile after the other, each read while the one before is in work."""
    for tile, a in read_ahead(job.source, job.tiles[job.first :]):
        data = checked_tile(job.source, tile, a)
        partial = job.work(data)
        part = partial.pop(PART, None)
        yield TileResult(data.fingerprint, part, [(0, partial)])


def read_ahead(source: ArraySource, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Array]]:
    """Yield tiles and their entries, the next one being read meanwhile."""
    reader = ThreadPoolExecutor(1, "tnlib-read")
    try:
        upcoming = reader.submit(source.read, tiles[0])
        for k, tile in enumerate(tiles):
            a = upcoming.result()
            if k + 1 < len(tiles):
                upcoming = reader.submit(source.read, tiles[k + 1])
            yield tile, a
    finally:
        # The garbage collector may close this generator while a thread starts, with a lock that joining would wait for
        reader.shutdown(wait=False)


class Passes:
    """Runs passes within a memory limit, and holds the arrays that they leave: a context manager.

    Parameters
    ----------
    source
        The array to decompose.
    limit
        The memory that all of it may take.
    folder
        Where arrays are stored that do not fit, and the state of the passes.
    workers
        Runs the passes over sources that workers read; None where there are none.
    """

    def __init__(
        self, source: ArraySource, limit: MemoryLimit, folder: RunFolder, workers: Executor | None = None
    ) -> None:
        self.source, self.limit, self._folder, self._workers = source, limit, folder, workers
        self._n_passes = 0
        self._n_arrays = 0
        self._projected: Array | None = None  # of `as_source`
        self._fingerprints: dict[tuple[ArraySource, int, Tile], float] = {}  # of the tiles read so far

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array to decompose."""
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array to decompose."""
        return self.source.dtype

    def __enter__(self) -> Self:
        self._folder.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        self._folder.__exit__(kind, *problem)

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
        total = TreeSum(combine, self._folder.load(name))
        done = total.count
        run = self._workers if source.on_workers and self._workers is not None else run_serially
        results = run(TilePass(source, tiles, work, combine, done)) if done < len(tiles) else ()
        for result in results:
            self._refuse_changes(source, tiles[done], result.fingerprint)
            if store is not None and result.part is not None:
                store(tiles[done], result.part)
            for level, partial in result.sums:
                total.add(level, partial)
            done += 1
            notify(f"pass {int(name) + 1}", done, len(tiles))
            if self._folder.is_resumable and total.count == done and (done % _CHECKPOINT == 0 or done == len(tiles)):
                self._folder.store(name, total.as_arrays())
        return total.total()

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array that a pass fills: in memory where it fits and need not survive, else in the folder."""
        self._n_arrays += 1
        if math.prod(shape) * dtype.itemsize <= self.limit.array and not self._folder.is_resumable:
            return np.empty(shape, dtype)
        return self._folder.array(str(self._n_arrays), shape, dtype)

    def as_source(self, a: Array) -> ArraySource:
        """Return an array of `new_array` as the source of the next pass, in place of the last one that was made one."""
        if self._projected is not None:
            self.discard(self._projected)
        self._projected = a
        return open_source(self.source.function, self.source.parameter, a)

    def discard(self, a: Array) -> None:
        """Remove the file of an array of `new_array` that is no longer needed."""
        if isinstance(a, np.memmap):
            self._folder.remove(a)

    def _refuse_changes(self, source: ArraySource, tile: Tile, fingerprint: float) -> None:
        known = self._fingerprints.setdefault((source, source.exponent, tile), fingerprint)
        if known != fingerprint and not math.isnan(fingerprint):
            raise FileFormatError(
                f"{source.function}: {source.parameter} must not change during the decomposition, got other numbers in "
                f"{words_of(tile)} than before; copy it first."
            )


def write_tile(out: Array, index: tuple[slice, ...], values: Array) -> None:
    """Assign a part of an array of `Passes.new_array`, which takes no memory if it is mapped."""
    if isinstance(out, WrittenArray):
        out.write(index, values)
    else:
        out[index] = values
    release_pages(out)


class TreeSum:
    """Results of the tiles so far, as sums of 1, 2, 4, ... neighbouring tiles, the longest first.

    Parameters
    ----------
    combine
        Function that adds two results.
    stored
        What `as_arrays` of an interrupted pass returned, or None.
    """

    def __init__(self, combine: Combine, stored: Mapping[str, Array] | None = None) -> None:
        self._combine = combine
        self.count = 0
        self._sums: list[tuple[int, Partial]] = []  # binary logarithm of the number of tiles, sum
        if stored is not None:
            self.count = int(stored["done"])
            partials: list[Partial] = [{} for _ in stored["levels"]]
            for name, a in stored.items():
                k, _, key = name.partition(".")
                if key:
                    partials[int(k)][key] = a
            self._sums = list(zip(stored["levels"].tolist(), partials, strict=True))

    def add(self, level: int, partial: Partial) -> None:
        """Add the sum of the next 2**level tiles: a carry as in binary numbers."""
        self.count += 1 << level
        while self._sums and self._sums[-1][0] == level:
            partial = self._combine(self._sums.pop()[1], partial)
            level += 1
        self._sums.append((level, partial))

    def total(self) -> Partial:
        """Return the sum of all tiles."""
        total = self._sums[-1][1]
        for _, partial in reversed(self._sums[:-1]):
            total = self._combine(partial, total)
        return total

    def as_arrays(self) -> dict[str, Array]:
        """Return all sums, to be stored."""
        arrays = {f"{k}.{key}": a for k, (_, partial) in enumerate(self._sums) for key, a in partial.items()}
        return {"done": np.array(self.count), "levels": np.array([level for level, _ in self._sums]), **arrays}


def add(a: Partial, b: Partial) -> Partial:
    """Return the sum of two results; an entry that one of them lacks is that of the other."""
    out = dict(a)
    for key, value in b.items():
        out[key] = out[key] + value if key in out else value
    return out
