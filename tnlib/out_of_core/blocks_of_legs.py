"""Parts of a small array that tiles contribute to, named by their position along some legs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.out_of_core.array_source import Tile
from tnlib.out_of_core.tile_data import Partial


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
