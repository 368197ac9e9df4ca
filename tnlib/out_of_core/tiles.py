"""Tiles of an array: its division, a checked tile in memory, and parts of small arrays that tiles contribute to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import refuse_infinite
from tnlib.linalg.scaling import exponent_of, shift, squares
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.storage import MemoryLimit

Partial: TypeAlias = dict[str, Array]

PART = "part"  # key of what a pass stores for a tile; it is not summed

_SAFE_NORMS = (1e-100, 1e100)  # of tiles: sums of squares, and their products with small numbers, stay in range


class TileData(NamedTuple):
    """A tile in memory: the entries of the array are `array * 2**exponent`."""

    tile: Tile
    array: Array
    exponent: int
    square: float  # sum of squares of `array`
    fingerprint: float  # sum of squares as read; another one in a later pass means that the array has changed


Work: TypeAlias = Callable[[TileData], Partial]
Combine: TypeAlias = Callable[[Partial, Partial], Partial]


def checked_tile(source: ArraySource, tile: Tile, a: Array) -> TileData:
    """Return a tile whose squares are in range, or refuse NaN and inf."""
    fingerprint = square = squares(np.ravel(a, "K"))
    exponent = 0
    if not math.isfinite(square) or not _SAFE_NORMS[0] < math.sqrt(square) < _SAFE_NORMS[1]:
        refuse_infinite_tile(source, tile, a)
        exponent = exponent_of(a)
        a = shift(a, -exponent)
        square = squares(np.ravel(a, "K"))
    return TileData(tile, a, exponent, square, fingerprint)


def words_of(tile: Tile) -> str:
    """Return the name of a tile in messages."""
    return "the chunk [" + ", ".join(f"{start}:{stop}" for start, stop in tile) + "]"


def refuse_infinite_tile(source: ArraySource, tile: Tile, a: Array) -> None:
    """Raise where a tile holds NaN or inf, and name the tile and the index of the first one in it."""
    if np.isfinite(a).all():
        return
    tile, a = source.as_passed(tile, a)
    try:
        refuse_infinite(source.function, source.parameter, a)
    except ArgumentError as problem:
        raise ArgumentError(
            f"{str(problem).partition(';')[0]} of {words_of(tile)}; replace NaN and inf first."
        ) from None


def block_name(tile: Tile, legs: Sequence[int]) -> str:
    """Return the key of the part of a sum that belongs to the position of a tile along `legs`."""
    return "block " + " ".join(f"{tile[a][0]}:{tile[a][1]}" for a in legs)


def block_index(tile: Tile, legs: Sequence[int]) -> tuple[slice, ...]:
    """Return the position of a tile along `legs`."""
    return tuple(slice(*tile[a]) for a in legs)


def join_blocks(total: Partial, tiles: Sequence[Tile], legs: Sequence[int], shape: Sequence[int]) -> Array:
    """Return the array (*shape, c) of the blocks (indices along `legs`, c) of a sum."""
    first = total[block_name(tiles[0], legs)]
    out = np.empty((*shape, first.shape[-1]), first.dtype)
    for tile in tiles:
        index = block_index(tile, legs)
        out[index] = total[block_name(tile, legs)].reshape(*(part.stop - part.start for part in index), -1)
    return out


def tiles_of(source: ArraySource, whole: Collection[int], limit: MemoryLimit) -> list[Tile]:
    """Return the tiles of a source with the axes `whole` undivided, in the order of storage.

    Tiles are bounded by chunks, so that a pass reads every chunk once. Chunks of other storages than Dask are divided
    where a tile of whole chunks exceeds a sixth of the limit.
    """
    if source.edges is not None:
        return _tiles_of_chunks(source, source.edges, whole, limit)
    for smallest in (source.chunks, (1,) * len(source.shape)):
        widths = _widths(source, whole, smallest, limit.tile)
        if math.prod(widths) * source.dtype.itemsize <= limit.largest_tile:
            break
    else:
        raise _too_large(source, whole, limit)
    order = source.axes_by_stride
    ranges = [[(i, min(i + widths[a], source.shape[a])) for i in range(0, source.shape[a], widths[a])] for a in order]
    position = {a: k for k, a in enumerate(order)}
    return [tuple(bounds[position[a]] for a in range(len(order))) for bounds in itertools.product(*ranges)]


def _widths(source: ArraySource, whole: Collection[int], smallest: tuple[int, ...], target: int) -> list[int]:
    """Return the sizes of a tile: from the smallest ones, enlarged along contiguous axes first."""
    widths = [n if a in whole else min(n, smallest[a]) for a, n in enumerate(source.shape)]
    for a in reversed(source.axes_by_stride):
        room = target // max(1, math.prod(widths) * source.dtype.itemsize)
        if room <= 1 or widths[a] == source.shape[a]:
            continue
        widths[a] = min(source.shape[a], widths[a] * room)
        if widths[a] < source.shape[a]:
            break
    return widths


def _tiles_of_chunks(
    source: ArraySource, edges: Sequence[Sequence[int]], whole: Collection[int], limit: MemoryLimit
) -> list[Tile]:
    """Return tiles of whole chunks, neighbours merged to at least the size of a tile; chunks are never divided."""
    edges = _edges_with_whole(source, edges, whole)
    if joined_size(source, whole) > limit.largest_tile:
        if math.prod(source.shape[a] for a in whole) * source.dtype.itemsize > limit.largest_tile:
            raise _too_large(source, whole, limit)
        largest = tuple(max(stop - start for start, stop in itertools.pairwise(bounds)) for bounds in edges)
        raise ArgumentError(
            f"{source.function}: {source.parameter} must have chunks that join to at most {limit.largest_tile:,} bytes "
            f"with legs {tuple(whole)} whole, got {joined_size(source, whole):,} for {largest}; pass "
            f"{source.rechunk_advice(whole)}, or raise storage.memory."
        )
    for a in reversed(range(len(edges))):
        size = _largest(edges) * source.dtype.itemsize
        edges[a] = _merged(edges[a], min(-(-limit.tile // size), limit.largest_tile // (2 * size)))
    return list(itertools.product(*(itertools.pairwise(bounds) for bounds in edges)))


def joined_size(source: ArraySource, whole: Collection[int]) -> int:
    """Return the bytes of the smallest tiles of whole chunks that `tiles_of` makes; 0 where chunks may be divided."""
    if source.edges is None:
        return 0
    return _largest(_edges_with_whole(source, source.edges, whole)) * source.dtype.itemsize


def _edges_with_whole(
    source: ArraySource, edges: Sequence[Sequence[int]], whole: Collection[int]
) -> list[Sequence[int]]:
    return [(0, n) if a in whole else edges[a] for a, n in enumerate(source.shape)]


def _largest(edges: Sequence[Sequence[int]]) -> int:
    """Return the number of entries of the largest tile between these edges."""
    return math.prod(max(stop - start for start, stop in itertools.pairwise(bounds)) for bounds in edges)


def _merged(edges: Sequence[int], count: int) -> Sequence[int]:
    """Return the edges of groups of nearly equal numbers of chunks, at most `count`."""
    n_chunks = len(edges) - 1
    n_groups = -(-n_chunks // max(1, count))
    return [edges[k * n_chunks // n_groups] for k in range(n_groups + 1)]


def _too_large(source: ArraySource, whole: Collection[int], limit: MemoryLimit) -> ArgumentError:
    needed = 6 * math.prod(source.shape[a] for a in whole) * source.dtype.itemsize
    return ArgumentError(
        f"{source.function}: storage.memory must be at least {needed:,} bytes for legs {tuple(whole)} of an array of "
        f"shape {source.shape}, got {limit.total:,}; raise it, or split these legs."
    )
