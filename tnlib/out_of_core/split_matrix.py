"""A matrix that is read by slices, as a tensor with paired row and column legs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array


def with_paired_legs(a: Any, rows: Sequence[int], columns: Sequence[int]) -> Any:
    """Return a matrix as the tensor (m[0], n[0], m[1], n[1], ...), which reads what is sliced and nothing else."""
    if isinstance(a, np.ndarray):  # a view, of a map too: splitting legs never copies
        d = len(rows)
        return a.reshape(*rows, *columns).transpose([k + side for k in range(d) for side in (0, d)])
    return SplitMatrix(a, rows, columns)


class SplitMatrix:
    """The tensor (m[0], n[0], m[1], n[1], ...) of a matrix; slices are read by runs of rows and columns."""

    def __init__(self, a: Any, rows: Sequence[int], columns: Sequence[int]) -> None:
        self._a, self._rows, self._columns = a, tuple(rows), tuple(columns)
        self.shape = tuple(n for pair in zip(rows, columns, strict=True) for n in pair)
        self.dtype: np.dtype[Any] = a.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Array:
        row_slices, column_slices = index[::2], index[1::2]
        row_runs, column_runs = flat_ranges(self._rows, row_slices), flat_ranges(self._columns, column_slices)
        out = np.block([[np.asarray(self._a[i:j, k:l]) for k, l in column_runs] for i, j in row_runs])
        widths = [part.stop - part.start for part in (*row_slices, *column_slices)]
        d = len(self._rows)
        return out.reshape(widths).transpose([k + side for k in range(d) for side in (0, d)])


def flat_ranges(sizes: Sequence[int], slices: Sequence[slice]) -> list[tuple[int, int]]:
    """Return the ranges of flat indices, in order, that slices of legs of these sizes select."""
    split = len(sizes)
    while split > 0 and slices[split - 1] == slice(0, sizes[split - 1]):
        split -= 1
    length = math.prod(sizes[split:])  # legs from here on are whole
    if split == 0:
        return [(0, length)]
    grid = np.ix_(*(np.arange(part.start, part.stop) for part in slices[: split - 1]))
    starts = np.zeros((), np.int64)
    for i, n in zip(grid, sizes[: split - 1], strict=True):
        starts = starts * n + i
    first, last = slices[split - 1].start, slices[split - 1].stop
    n = sizes[split - 1]
    return [((int(k) * n + first) * length, (int(k) * n + last) * length) for k in np.ravel(starts)]
