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
        for k, term in enumerate(terms):
            for index in term:
                self.holders.setdefault(index, []).append(k)
        joined = [index for index, holders in self.holders.items() if len(holders) + (index in result) != 2]
        self.copy_tensors = {index: len(terms) + n for n, index in enumerate(joined)}

    def bonds(self) -> Iterator[tuple[str, int, int, str]]:
        """Return the index, both nodes and the name of every bond; of the bonds of a copy tensor one has a name."""
        for index, holders in self.holders.items():
            if index in self.copy_tensors:
                for n, k in enumerate(holders):
                    yield index, k, self.copy_tensors[index], "" if n else index
            elif len(holders) == 2:
                yield index, holders[0], holders[1], index

    def root(self, index: str) -> int:
        """Return the node from which the open leg of an index starts."""
        return self.copy_tensors.get(index, self.holders[index][0])

    def far_end(self, index: str, k: int, positions: Sequence[Point], ends: Mapping[str, Point]) -> Point:
        """Return the other end of the leg `index` of tensor k; `ends` are those of open legs."""
        if index in self.copy_tensors:
            return positions[self.copy_tensors[index]]
        others = [other for other in self.holders[index] if other != k]
        return positions[others[0]] if others else ends.get(index, positions[k])
