"""A few orthonormal rows that nearly span the row space of a large matrix, from a sample of its rows.

Single rows are read from files. The rows of a sample of an array of chunks lie in a few groups of chunks, so that only
these are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.row_sampling import LEAST_ROWS, sampled_rows
from tnlib.linalg.scaling import exponent_of, norm, shift
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.blocks_of_legs import block_index, block_name
from tnlib.out_of_core.row_space import leading_legs, rows_of, tiles_of_rows
from tnlib.out_of_core.tile_data import Partial, TileData
from tnlib.out_of_core.tile_passes import Passes
from tnlib.out_of_core.tiling import joined_size
from tnlib.out_of_core.tree_sum import add

_LEAST_GROUPS, _MOST_GROUPS = 4, 16  # of chunks with the same rows: an eighth of them is read, and no more than these
_ROWS_OF_CHUNKS = 512


def sampled_row_space(passes: Passes, source: ArraySource, kept: Sequence[int], threshold: float) -> Array | None:
    """Return orthonormal rows (l, n) of the matrix with columns `kept`, and set the scale of the source by a sample.

    They span the sample within `threshold` times its norm. None where l were not small, or a sample were too large.
    """
    m = math.prod(source.shape[a] for a in leading_legs(source, kept))
    n = math.prod(source.shape[a] for a in kept)
    most = passes.limit.array // (4 * 8 * n)
    if most < LEAST_ROWS or m < 2 * LEAST_ROWS:
        return None
    if source.edges is None:
        rows = SourceRows(source, kept)
        size = rows.set_scale()
        return sampled_rows(rows, limit=threshold * size, most=most) if size > 0 else None  # type: ignore[arg-type]
    held = _rows_of_chunks(passes, source, kept, min(most, _ROWS_OF_CHUNKS))
    if held is None or not held.any():
        return None
    source.exponent = exponent_of(held)
    held = shift(held, -source.exponent)
    limit = threshold * norm(held) * math.sqrt(m / len(held))
    return sampled_rows(HeldRows(held, m), limit=limit, most=len(held))  # type: ignore[arg-type]


def _rows_of_chunks(passes: Passes, source: ArraySource, kept: Sequence[int], count: int) -> Array | None:
    """Return a sample of at most `count` rows in random order.

    None where reading it were no less than a quarter of a pass, and chunks can be joined to tiles of whole leading
    legs, as the other way requires.
    """
    leading = leading_legs(source, kept)
    tiles = tiles_of_rows(passes, source, kept)
    groups = list(dict.fromkeys(tuple(tile[a] for a in leading) for tile in tiles))
    if len(groups) < _LEAST_GROUPS and joined_size(source, leading) <= passes.limit.largest_tile:
        return None
    rng = np.random.default_rng(0)  # the same input gives the same output
    n_chosen = max(1, min(len(groups) // 8, _MOST_GROUPS))
    numbers = {}  # of the rows of a group
    for k in np.sort(rng.choice(len(groups), n_chosen, replace=False)).tolist():
        size = math.prod(stop - start for start, stop in groups[k])
        numbers[groups[k]] = np.sort(rng.choice(size, min(size, count // n_chosen), replace=False))

    def work(data: TileData) -> Partial:
        rows = rows_of(data.array, kept)[numbers[tuple(data.tile[a] for a in leading)]]
        return {block_name(data.tile, range(len(data.tile))): shift(rows, data.exponent)}

    own = [tile for tile in tiles if tuple(tile[a] for a in leading) in numbers]
    total = passes.reduce(source, own, work, add)
    position, start = {}, 0  # of the rows of a group in the sample
    for group, rows in numbers.items():
        position[group] = slice(start, start + len(rows))
        start += len(rows)
    out = np.empty((start, *(source.shape[a] for a in kept)), source.dtype)
    for tile in own:
        index = (position[tuple(tile[a] for a in leading)], *block_index(tile, kept))
        out[index] = total[block_name(tile, range(len(tile)))].reshape(out[index].shape)
    return out.reshape(start, -1)[rng.permutation(start)]


class HeldRows:
    """Rows in random order that stand for all of a matrix.

    Parameters
    ----------
    held
        Rows (k, n).
    m
        Number of rows of the matrix.
    """

    def __init__(self, held: Array, m: int) -> None:
        self._held, self.shape, self.dtype = held, (m, held.shape[1]), held.dtype

    def __getitem__(self, numbers: Array) -> Array:
        return self._held[: len(numbers)]


class SourceRows:
    """Rows of the matrix, read by their numbers."""

    def __init__(self, source: ArraySource, kept: Sequence[int]) -> None:
        self._source, self._kept = source, kept
        self._leading = leading_legs(source, kept)
        self._grid = tuple(source.shape[a] for a in self._leading)
        self.shape = math.prod(self._grid), math.prod(source.shape[a] for a in kept)
        self.dtype = source.dtype
        self._read: dict[int, Array] = {}

    def __getitem__(self, numbers: Array) -> Array:
        self._read = {int(k): self._row(int(k)) for k in numbers}
        return np.stack(list(self._read.values()))

    def _row(self, number: int) -> Array:
        if number in self._read:
            return self._read[number]
        index = dict(zip(self._leading, map(int, np.unravel_index(number, self._grid)), strict=True))
        tile: Tile = tuple((index[a], index[a] + 1) if a in index else (0, n) for a, n in enumerate(self._source.shape))
        row: Array = rows_of(self._source.read(tile), self._kept)[0]
        return row

    def set_scale(self) -> float:
        """Set the exponent of the source by a sample of rows, and return an estimate of its norm at that scale.

        NaN where the sample has one; the first pass names it.
        """
        m = self.shape[0]
        sample = self[np.sort(np.random.default_rng(0).choice(m, min(m, LEAST_ROWS), replace=False))]
        if not np.isfinite(sample).all():
            return math.nan
        self._source.exponent = exponent_of(sample)
        if self._source.exponent:
            self._read = {}
            sample = self[np.sort(np.random.default_rng(0).choice(m, min(m, LEAST_ROWS), replace=False))]
        return norm(sample) * math.sqrt(m / len(sample))
