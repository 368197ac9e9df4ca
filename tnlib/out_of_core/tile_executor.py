"""Execution of a pass in this process: one tile after the other, each read while the one before is in work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tnlib._typing import Array
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.tile_data import PART, Combine, Partial, Work, checked_tile


class TileResult(NamedTuple):
    """A tile that is done: its part for the caller, and the sums over 2**level tiles that it completes."""

    fingerprint: float
    part: Array | None
    sums: list[tuple[int, Partial]]


@dataclass(frozen=True)
class TilePass:
    """One function for the tiles of a source from `first` on, and the sum of its results.

    Parameters
    ----------
    source, tiles
        The source, and all tiles of the pass.
    work
        Function of a tile in memory. It may be run in another process, and twice.
    combine
        Function that adds two results.
    first
        Number of the first tile that is not done.
    """

    source: ArraySource
    tiles: Sequence[Tile]
    work: Work
    combine: Combine
    first: int = 0


class TileExecutor(Protocol):
    """Runs passes."""

    def run(self, own: TilePass) -> Iterator[TileResult]:
        """Yield the results of the tiles, in their order."""


class SerialExecutor:
    """Runs passes in this process."""

    def run(self, own: TilePass) -> Iterator[TileResult]:
        """Yield the results of the tiles, in their order."""
        for tile, a in read_ahead(own.source, own.tiles[own.first :]):
            data = checked_tile(own.source, tile, a)
            partial = own.work(data)
            part = partial.pop(PART, None)
            yield TileResult(data.fingerprint, part, [(0, partial)])


def read_ahead(source: ArraySource, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Array]]:
    """Yield tiles and their entries, the next one being read meanwhile."""
    with ThreadPoolExecutor(1, "tnlib-read") as reader:
        upcoming = reader.submit(source.read, tiles[0])
        for k, tile in enumerate(tiles):
            a = upcoming.result()
            if k + 1 < len(tiles):
                upcoming = reader.submit(source.read, tiles[k + 1])
            yield tile, a
