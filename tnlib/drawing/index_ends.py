"""Ends of the indices of a network, with copy tensors on indices that do not have exactly two ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tnlib.drawing.diagram import Point


class IndexEnds:
    """The nodes that every index joins: tensors 0, 1, ... with the indices `terms`, and copy tensors behind them.

    Ends of an index are tensors and, for an index of `result`, the open leg.
    """

    def __init__(self, terms: Sequence[Sequence[str]], result: Sequence[str]) -> None:
        self.holders: dict[str, list[int]] = {}  # tensors that have the index
        self.axes: dict[str, list[int]] = {}  # axes of these tensors
        for k, term in enumerate(terms):
            for axis, index in enumerate(term):
                self.holders.setdefault(index, []).append(k)
                self.axes.setdefault(index, []).append(axis)
        joined = [index for index, holders in self.holders.items() if len(holders) + (index in result) != 2]
        self.copy_tensors = {index: len(terms) + n for n, index in enumerate(joined)}

    def bonds(self) -> Iterator[tuple[str, int, int, str, tuple[int, int | None]]]:
        """Return index, nodes, name and axes of every bond; of the bonds of a copy tensor one has a name."""
        for index, holders in self.holders.items():
            if index in self.copy_tensors:
                for n, k in enumerate(holders):
                    yield index, k, self.copy_tensors[index], "" if n else index, (self.axes[index][n], None)
            elif len(holders) == 2:
                yield index, holders[0], holders[1], index, (self.axes[index][0], self.axes[index][1])

    def root(self, index: str) -> int:
        """Return the node from which the open leg of an index starts."""
        return self.copy_tensors.get(index, self.holders[index][0])

    def open_axes(self, index: str) -> tuple[int | None, None]:
        """Return the axes of the open leg of an index."""
        return None if index in self.copy_tensors else self.axes[index][0], None

    def far_end(self, index: str, k: int, positions: Sequence[Point], ends: Mapping[str, Point]) -> Point:
        """Return the other end of the leg `index` of tensor k; `ends` are those of open legs."""
        if index in self.copy_tensors:
            return positions[self.copy_tensors[index]]
        others = [other for other in self.holders[index] if other != k]
        return positions[others[0]] if others else ends.get(index, positions[k])
