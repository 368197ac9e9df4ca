r"""Products of a large matrix with a few rows or columns, tile by tile.

The rows of the matrix A (m, n) are the indices of the leading legs, its columns those of the `kept` legs. Every tile
holds rows A_i as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import times_adjoint
from tnlib.linalg.projection import adjoint_times, residual_norm
from tnlib.linalg.row_sampling import LEAST_ROWS
from tnlib.linalg.scaling import exponent_of, norm, squares
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.leg_reduction import add
from tnlib.out_of_core.tile_passes import Partial, Passes, TileData, write_tile

_DIFFERENCE, _ROUNDING = 1e-11, 1e-14  # as in `linalg.projection`


class SourceRows:
    """Rows of the matrix, read by their numbers."""

    def __init__(self, source: ArraySource, kept: Sequence[int]) -> None:
        self._source, self._kept = source, kept
        self._leading = [a for a in range(len(source.shape)) if a not in kept]
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


def rows_of(a: Array, kept: Sequence[int]) -> Array:
    """Return a tile as the matrix (other legs, `kept`)."""
    columns = math.prod(a.shape[k] for k in kept)
    return np.moveaxis(a, kept, range(-len(kept), 0)).reshape(-1, columns)


def times_rows(passes: Passes, source: ArraySource, kept: Sequence[int], rows: Array) -> tuple[Array | None, float]:
    """Return A V^H (m, l) of orthonormal `rows` V (l, n), and norm(A).

    The product is None where the squares of a tile leave the range of numbers.
    """
    leading = [a for a in range(len(source.shape)) if a not in kept]
    out = passes.new_array((*(source.shape[a] for a in leading), len(rows)), rows.dtype)

    def work(data: TileData) -> Partial:
        block = times_adjoint(np.ascontiguousarray(rows_of(data.array, kept)), rows)  # (others) [(kept)] l
        index = tuple(slice(*data.tile[a]) for a in leading)
        write_tile(out, index, block.reshape(*(data.array.shape[a] for a in leading), -1))
        return {"square": np.array(data.square), "scaled": np.array(data.exponent != 0 and data.square > 0)}

    total = passes.reduce(source, passes.tiles(source, kept), work, add)
    columns = None if total["scaled"] else np.array(out).reshape(-1, len(rows))
    passes.discard(out)
    return columns, math.sqrt(total["square"])


def project_columns(
    passes: Passes, source: ArraySource, kept: Sequence[int], basis: Array, *, norm: float, negligible: float
) -> tuple[Array, float]:
    """Return E^H A (r, n) and norm(A - E E^H A) of orthonormal E = `basis` (m, r).

    The error is the difference of two squares. Where that is not above roundoff it is measured in another pass, unless
    roundoff is `negligible`.
    """
    leading = [a for a in range(len(source.shape)) if a not in kept]
    by_leg = basis.reshape(*(source.shape[a] for a in leading), -1)
    tiles = passes.tiles(source, kept)

    def part(data: TileData) -> Array:
        return by_leg[tuple(slice(*data.tile[a]) for a in leading)].reshape(-1, basis.shape[1])

    def multiply(data: TileData) -> Partial:
        a = np.ascontiguousarray(rows_of(data.array, kept))
        return {"product": adjoint_times(part(data), a[None])[0]}  # r [(others)] (kept)

    projected = passes.reduce(source, tiles, multiply, add)["product"]
    square = norm**2
    difference = max(0.0, square - squares(projected)) + _ROUNDING * square
    if difference > _DIFFERENCE * square or math.sqrt(_DIFFERENCE * square) <= negligible:
        return projected, math.sqrt(difference)

    def measure(data: TileData) -> Partial:
        residual = residual_norm(rows_of(data.array, kept), part(data), projected)
        return {"residual": np.array(residual**2)}

    return projected, math.sqrt(passes.reduce(source, tiles, measure, add)["residual"])
