"""Division of an array into tiles that hold some of its legs whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from tnlib.out_of_core.array_source import ArraySource, Tile


def tiles_of(source: ArraySource, whole: Collection[int], target: int, limit: int) -> list[Tile] | None:
    """Return tiles of about `target` bytes with the axes `whole` undivided, in the order of storage.

    Tiles are bounded by chunks, so that a pass reads every chunk once, unless a tile of whole chunks exceeds `limit`
    bytes. None where a single index of the other axes does.
    """
    for smallest in (source.chunks, (1,) * len(source.shape)):
        widths = _widths(source, whole, smallest, target)
        if math.prod(widths) * source.dtype.itemsize <= limit:
            break
    else:
        return None
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
