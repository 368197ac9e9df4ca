"""Sums over a fixed binary tree of tiles: the order of additions depends on the tiles alone, not on who adds them."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.out_of_core.tile_data import Combine, Partial


class TreeSum:
    """Results of the tiles so far, as sums of 1, 2, 4, ... neighbouring tiles, the longest first."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[tuple[int, Partial]] = []  # binary logarithm of the number of tiles, sum

    def add(self, level: int, partial: Partial, combine: Combine) -> None:
        """Add the sum of the next 2**level tiles: a carry as in binary numbers."""
        self.count += 1 << level
        while self._sums and self._sums[-1][0] == level:
            partial = combine(self._sums.pop()[1], partial)
            level += 1
        self._sums.append((level, partial))

    def total(self, combine: Combine) -> Partial:
        """Return the sum of all tiles."""
        total = self._sums[-1][1]
        for _, partial in reversed(self._sums[:-1]):
            total = combine(partial, total)
        return total

    def as_arrays(self) -> dict[str, Array]:
        """Return all sums, to be stored."""
        arrays = {f"{k}.{key}": a for k, (_, partial) in enumerate(self._sums) for key, a in partial.items()}
        return {"done": np.array(self.count), "levels": np.array([level for level, _ in self._sums]), **arrays}

    @classmethod
    def from_arrays(cls, stored: dict[str, Array]) -> TreeSum:
        """Return the sums that `as_arrays` returned."""
        out = cls()
        out.count = int(stored["done"])
        partials: list[Partial] = [{} for _ in stored["levels"]]
        for name, a in stored.items():
            k, _, key = name.partition(".")
            if key:
                partials[int(k)][key] = a
        out._sums = list(zip(stored["levels"].tolist(), partials, strict=True))
        return out


def add(a: Partial, b: Partial) -> Partial:
    """Return the sum of two results; an entry that one of them lacks is that of the other."""
    out = dict(a)
    for key, value in b.items():
        out[key] = out[key] + value if key in out else value
    return out


def dyadic_ranges(first: int, last: int) -> list[tuple[int, int]]:
    """Return (level, start) of the largest aligned ranges of 2**level tiles that cover first ... last - 1, in order.

    >>> dyadic_ranges(0, 6)
    [(2, 0), (1, 4)]
    """
    out = []
    while first < last:
        level = (last - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)
        out.append((level, first))
        first += 1 << level
    return out
