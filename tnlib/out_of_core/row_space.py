r"""Products of a large matrix with a few rows or columns, tile by tile.

The rows of the matrix A (m, n) are the indices of the leading legs, its columns those of the `kept` legs. A tile holds
a block A_ij. In files the rows of a tile are whole; chunks of Dask may divide both sides.

    A V^H  =  [sum over j of A_ij V_j^H]_i,        E^H A  =  [sum over i of E_i^H A_ij]_j

"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import times_adjoint
from tnlib.linalg.projection import adjoint_times, residual_norm
from tnlib.linalg.scaling import squares
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.blocks_of_legs import block_index, block_name, join_blocks
from tnlib.out_of_core.tile_data import Partial, TileData
from tnlib.out_of_core.tile_passes import Passes
from tnlib.out_of_core.tree_sum import add

_DIFFERENCE, _ROUNDING = 1e-11, 1e-14  # as in `linalg.projection`


def leading_legs(source: ArraySource, kept: Sequence[int]) -> list[int]:
    """Return the legs that form the rows."""
    return [a for a in range(len(source.shape)) if a not in kept]


def tiles_of_rows(passes: Passes, source: ArraySource, kept: Sequence[int]) -> list[Tile]:
    """Return tiles of whole rows, or of whole chunks of Dask."""
    return passes.tiles(source, kept if source.edges is None else ())


def rows_of(a: Array, kept: Sequence[int]) -> Array:
    """Return a tile as the matrix (other legs, `kept`)."""
    columns = math.prod(a.shape[k] for k in kept)
    return np.moveaxis(a, kept, range(-len(kept), 0)).reshape(-1, columns)


def times_rows(passes: Passes, source: ArraySource, kept: Sequence[int], rows: Array) -> tuple[Array | None, float]:
    """Return A V^H (m, l) of orthonormal `rows` V (l, n), and norm(A).

    The product is None where the squares of a tile leave the range of numbers.
    """
    leading = leading_legs(source, kept)
    by_leg = rows.T.reshape(*(source.shape[a] for a in kept), -1)

    def work(data: TileData) -> Partial:
        part = by_leg[block_index(data.tile, kept)].reshape(-1, len(rows)).T
        block = times_adjoint(np.ascontiguousarray(rows_of(data.array, kept)), np.ascontiguousarray(part))
        scaled = np.array(data.exponent != 0 and data.square > 0)
        return {"square": np.array(data.square), "scaled": scaled, block_name(data.tile, leading): block}

    tiles = tiles_of_rows(passes, source, kept)
    total = passes.reduce(source, tiles, work, add)
    norm = math.sqrt(total["square"])
    if total["scaled"]:
        return None, norm
    return join_blocks(total, tiles, leading, [source.shape[a] for a in leading]).reshape(-1, len(rows)), norm


def project_columns(
    passes: Passes, source: ArraySource, kept: Sequence[int], basis: Array, *, norm: float, negligible: float
) -> tuple[Array, float]:
    """Return E^H A (r, n) and norm(A - E E^H A) of orthonormal E = `basis` (m, r).

    The error is the difference of two squares. Where that is not above roundoff it is measured in another pass, unless
    roundoff is `negligible`.
    """
    leading, rank = leading_legs(source, kept), basis.shape[1]
    by_leg = basis.reshape(*(source.shape[a] for a in leading), -1)
    tiles = tiles_of_rows(passes, source, kept)

    def multiply(data: TileData) -> Partial:
        a = np.ascontiguousarray(rows_of(data.array, kept))
        part = by_leg[block_index(data.tile, leading)].reshape(-1, rank)
        return {block_name(data.tile, kept): adjoint_times(part, a[None])[0].T}  # (kept) [(others)] r

    total = passes.reduce(source, tiles, multiply, add)
    columns = join_blocks(total, tiles, kept, [source.shape[a] for a in kept])
    projected = np.ascontiguousarray(columns.reshape(-1, rank).T)
    square = norm**2
    difference = max(0.0, square - squares(projected)) + _ROUNDING * square
    if difference > _DIFFERENCE * square or math.sqrt(_DIFFERENCE * square) <= negligible:
        return projected, math.sqrt(difference)

    def measure(data: TileData) -> Partial:
        left = by_leg[block_index(data.tile, leading)].reshape(-1, rank)
        right = columns[block_index(data.tile, kept)].reshape(-1, rank).T
        residual = residual_norm(rows_of(data.array, kept), left, right)
        return {"residual": np.array(residual**2)}

    return projected, math.sqrt(passes.reduce(source, tiles, measure, add)["residual"])
