"""A tile in memory: checked, and scaled so that its squares stay in range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import refuse_infinite
from tnlib.linalg.scaling import exponent_of, shift, squares
from tnlib.out_of_core.array_source import ArraySource, Tile

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
