r"""Products of a large matrix with a few rows or columns, tile by tile, and a sample of rows that spans its row space.

The rows of the matrix A (m, n) are the indices of the leading legs, its columns those of the `kept` legs. A tile holds
a block A_ij. In files the rows of a tile are whole; chunks of Dask may divide both sides.

    A V^H  =  [sum over j of A_ij V_j^H]_i,        E^H A  =  [sum over i of E_i^H A_ij]_j

Single rows are read from files. The rows of a sample of an array of chunks lie in a few groups of chunks, so that only
these are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import adjoint_times, projection_error, residual_norm, times_adjoint
from tnlib.linalg.multilinear import matrix_from
from tnlib.linalg.randomized import LEAST_ROWS, sampled_rows
from tnlib.linalg.scaling import exponent_of, norm, shift, squares
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.passes import Passes, add
from tnlib.out_of_core.tiles import Partial, TileData, block_index, block_name, join_blocks, joined_size

_LEAST_GROUPS, _MOST_GROUPS = 4, 16  # of chunks with the same rows: an eighth of them is read, and no more than these
_ROWS_OF_CHUNKS = 512


def times_rows(passes: Passes, source: ArraySource, kept: Sequence[int], rows: Array) -> tuple[Array | None, float]:
    """Return A V^H (m, l) of orthonormal `rows` V (l, n), and norm(A).

    The product is None where the squares of a tile leave the range of numbers.
    """
    leading = _leading_legs(source, kept)
    by_leg = rows.T.reshape(*(source.shape[a] for a in kept), -1)

    def work(data: TileData) -> Partial:
        part = by_leg[block_index(data.tile, kept)].reshape(-1, len(rows)).T
        block = times_adjoint(np.ascontiguousarray(matrix_from(data.array, kept)), np.ascontiguousarray(part))
        scaled = np.array(data.exponent != 0 and data.square > 0)
        return {"square": np.array(data.square), "scaled": scaled, block_name(data.tile, leading): block}

    tiles = _tiles_of_rows(passes, source, kept)
    total = passes.reduce(source, tiles, work, add)
    size = math.sqrt(total["square"])
    if total["scaled"]:
        return None, size
    return join_blocks(total, tiles, leading, [source.shape[a] for a in leading]).reshape(-1, len(rows)), size


def project_columns(
    passes: Passes, source: ArraySource, kept: Sequence[int], basis: Array, *, norm: float, negligible: float
) -> tuple[Array, float]:
    """Return E^H A (r, n) and norm(A - E E^H A) of orthonormal E = `basis` (m, r).

    The error is the difference of two squares. Where that is not above roundoff it is measured in another pass, unless
    roundoff is `negligible`.
    """
    leading, rank = _leading_legs(source, kept), basis.shape[1]
    by_leg = basis.reshape(*(source.shape[a] for a in leading), -1)
    tiles = _tiles_of_rows(passes, source, kept)

    def multiply(data: TileData) -> Partial:
        a = np.ascontiguousarray(matrix_from(data.array, kept))
        part = by_leg[block_index(data.tile, leading)].reshape(-1, rank)
        return {block_name(data.tile, kept): adjoint_times(part, a[None])[0].T}  # (kept) [(others)] r

    total = passes.reduce(source, tiles, multiply, add)
    columns = join_blocks(total, tiles, kept, [source.shape[a] for a in kept])
    projected = np.ascontiguousarray(columns.reshape(-1, rank).T)
    error = projection_error(norm**2, squares(projected), negligible)
    if error is not None:
        return projected, error

    def measure(data: TileData) -> Partial:
        left = by_leg[block_index(data.tile, leading)].reshape(-1, rank)
        right = columns[block_index(data.tile, kept)].reshape(-1, rank).T
        residual = residual_norm(matrix_from(data.array, kept), left, right)
        return {"residual": np.array(residual**2)}

    return projected, math.sqrt(passes.reduce(source, tiles, measure, add)["residual"])


def sampled_row_space(passes: Passes, source: ArraySource, kept: Sequence[int], threshold: float) -> Array | None:
    """Return orthonormal rows (l, n) of the matrix with columns `kept`, and set the scale of the source by a sample.

    They span the sample within `threshold` times its norm. None where l were not small, or a sample were too large.
    """
    m = math.prod(source.shape[a] for a in _leading_legs(source, kept))
    n = math.prod(source.shape[a] for a in kept)
    most = passes.limit.array // (4 * 8 * n)
    if most < LEAST_ROWS or m < 2 * LEAST_ROWS:
        return None
    if source.edges is None:
        rows = _SourceRows(source, kept)
        size = rows.set_scale()
        return sampled_rows(rows.take, (m, n), limit=threshold * size, most=most) if size > 0 else None
    held = _rows_of_chunks(passes, source, kept, min(most, _ROWS_OF_CHUNKS))
    if held is None or not held.any():
        return None
    source.exponent = exponent_of(held)
    held = shift(held, -source.exponent)
    limit = threshold * norm(held) * math.sqrt(m / len(held))
    # held rows are in random order, and stand for all of them
    return sampled_rows(lambda numbers: held[: len(numbers)], (m, n), limit=limit, most=len(held))


def _rows_of_chunks(passes: Passes, source: ArraySource, kept: Sequence[int], count: int) -> Array | None:
    """Return a sample of at most `count` rows in random order.

    None where reading it were no less than a quarter of a pass, and chunks can be joined to tiles of whole leading
    legs, as the other way requires.
    """
    leading = _leading_legs(source, kept)
    tiles = _tiles_of_rows(passes, source, kept)
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
        rows = matrix_from(data.array, kept)[numbers[tuple(data.tile[a] for a in leading)]]
        return {block_name(data.tile, range(len(data.tile))): shift(rows, data.exponent)}

    sampled = [tile for tile in tiles if tuple(tile[a] for a in leading) in numbers]
    total = passes.reduce(source, sampled, work, add)
    position, start = {}, 0  # of the rows of a group in the sample
    for group, rows in numbers.items():
        position[group] = slice(start, start + len(rows))
        start += len(rows)
    out = np.empty((start, *(source.shape[a] for a in kept)), source.dtype)
    for tile in sampled:
        index = (position[tuple(tile[a] for a in leading)], *block_index(tile, kept))
        out[index] = total[block_name(tile, range(len(tile)))].reshape(out[index].shape)
    return out.reshape(start, -1)[rng.permutation(start)]


class _SourceRows:
    """Rows of the matrix, read by their numbers."""

    def __init__(self, source: ArraySource, kept: Sequence[int]) -> None:
        self._source, self._kept = source, kept
        self._leading = _leading_legs(source, kept)
        self._grid = tuple(source.shape[a] for a in self._leading)
        self._read: dict[int, Array] = {}

    def take(self, numbers: Array) -> Array:
        """Return the rows of these numbers, those of the last call without reading them again."""
        self._read = {int(k): self._row(int(k)) for k in numbers}
        return np.stack(list(self._read.values()))

    def _row(self, number: int) -> Array:
        if number in self._read:
            return self._read[number]
        index = dict(zip(self._leading, map(int, np.unravel_index(number, self._grid)), strict=True))
        tile: Tile = tuple((index[a], index[a] + 1) if a in index else (0, n) for a, n in enumerate(self._source.shape))
        row: Array = matrix_from(self._source.read(tile), self._kept)[0]
        return row

    def set_scale(self) -> float:
        """Set the exponent of the source by a sample of rows, and return an estimate of its norm at that scale.

        NaN where the sample has one; the first pass names it.
        """
        m = math.prod(self._grid)
        sample = self.take(np.sort(np.random.default_rng(0).choice(m, min(m, LEAST_ROWS), replace=False)))
        if not np.isfinite(sample).all():
            return math.nan
        e = self._source.exponent = exponent_of(sample)
        sample, self._read = shift(sample, -e), {k: shift(row, -e) for k, row in self._read.items()}
        return norm(sample) * math.sqrt(m / len(sample))


def _leading_legs(source: ArraySource, kept: Sequence[int]) -> list[int]:
    """Return the legs that form the rows."""
    return [a for a in range(len(source.shape)) if a not in kept]


def _tiles_of_rows(passes: Passes, source: ArraySource, kept: Sequence[int]) -> list[Tile]:
    """Return tiles of whole rows, or of whole chunks of Dask."""
    return passes.tiles(source, kept if source.edges is None else ())
