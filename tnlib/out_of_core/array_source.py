"""Arrays that are read by slices: zarr arrays, h5py datasets, arrays in memory, and anything alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError, FileFormatError, in_one_line
from tnlib._typing import Array
from tnlib._validate import as_numbers
from tnlib.linalg.scaling import shift

Tile: TypeAlias = tuple[tuple[int, int], ...]  # start and stop along every axis


class ArraySource:
    """An array that is read by tiles, in one of the four native dtypes and multiplied by 2**-exponent.

    Parameters
    ----------
    function, parameter
        Names for messages.
    x
        Anything with `shape`, `dtype` and slicing.
    """

    def __init__(self, function: str, parameter: str, x: Any) -> None:
        self.function, self.parameter, self._x = function, parameter, x
        self.shape: tuple[int, ...] = tuple(map(int, x.shape))
        if not self.shape or 0 in self.shape:
            raise ArgumentError(
                f"{function}: {parameter} must have at least one leg and no leg of size 0, got shape {self.shape}; "
                "there is nothing in it."
            )
        self.dtype = as_numbers(function, parameter, np.zeros(1, x.dtype)).dtype
        self.exponent = 0
        self.on_workers = False  # where there are any; not the arrays that a pass leaves in this process
        self.edges: tuple[tuple[int, ...], ...] | None = None  # of chunks that must not be divided
        chunks: Any = getattr(x, "chunks", None)
        aligned = isinstance(chunks, tuple) and len(chunks) == len(self.shape) and all(map(_is_size, chunks))
        self.chunks: tuple[int, ...] = tuple(map(int, chunks)) if aligned else (1,) * len(self.shape)

    def paired(self, rows: Sequence[int], columns: Sequence[int]) -> ArraySource:
        """Return a matrix as the source of the tensor (rows[0], columns[0], rows[1], columns[1], ...)."""
        out = type(self)(self.function, self.parameter, with_paired_legs(self._x, rows, columns))
        out.on_workers = self.on_workers
        return out

    def rechunk_advice(self, whole: Collection[int]) -> str:
        """Return the call that makes chunks with the axes `whole` undivided."""
        chunks = ", ".join(f"{a}: {-1 if a in whole else repr('auto')}" for a in range(len(self.shape)))
        return f"{self.parameter}.rechunk({{{chunks}}})"

    def matrix_shape(self) -> tuple[int, int]:
        """Return the shape of a source with two legs, and refuse any other."""
        if len(self.shape) != 2:
            raise ArgumentError(
                f"{self.function}: {self.parameter} must have 2 legs, got shape {self.shape}; reshape it first."
            )
        return self.shape[0], self.shape[1]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries in the dtype in which they are computed."""
        return self.size * self.dtype.itemsize

    @property
    def axes_by_stride(self) -> tuple[int, ...]:
        """Axes from the one with the largest steps in storage to the contiguous one."""
        return axes_by_stride(self._x) if isinstance(self._x, np.ndarray) else tuple(range(len(self.shape)))

    def identity(self) -> dict[str, Any]:
        """Return what distinguishes this array from others, as JSON."""
        description = {"shape": list(self.shape), "dtype": str(self.dtype), "kind": type(self._x).__name__}
        file = getattr(getattr(self._x, "file", None), "filename", None)  # h5py
        place = f"{file}:{self._x.name}" if file else str(getattr(self._x, "store_path", ""))  # zarr
        return description | ({"path": place} if place else {})

    def as_passed(self, tile: Tile, a: Array) -> tuple[Tile, Array]:
        """Return a tile with the axes of the argument, for messages."""
        return tile, a

    def read_all(self) -> Array:
        """Return all entries, in any memory order."""
        return self.read(tuple((0, n) for n in self.shape))

    def read(self, tile: Tile) -> Array:
        """Return the entries of a tile, in any memory order."""
        return self._converted(self._fetch(tuple(slice(*bounds) for bounds in tile)), tile)

    def _converted(self, a: Array, tile: Tile) -> Array:
        """Return fetched entries of a tile in the dtype and at the scale of the source."""
        expected = tuple(stop - start for start, stop in tile)
        if a.shape != expected:
            raise FileFormatError(
                f"{self.function}: {self.parameter} must keep its shape {self.shape}, got a slice of shape {a.shape} "
                f"where {expected} was expected; do not change it during the decomposition."
            )
        if a.dtype != self.dtype:
            a = a.astype(self.dtype)
        return shift(a, -self.exponent) if self.exponent else a

    def _fetch(self, index: tuple[slice, ...]) -> Array:
        try:
            return np.asarray(self._x[index])
        except Exception as problem:  # whatever the codecs of h5py, zarr and others raise
            raise self._unreadable(index, in_one_line(problem)) from problem

    def _unreadable(self, index: tuple[slice, ...], reason: str) -> FileFormatError:
        where = ", ".join(f"{part.start}:{part.stop}" for part in index)
        return FileFormatError(
            f"{self.function}: {self.parameter} must be readable to its end, got {reason} at [{where}]; "
            "the storage may be cut short, write it again."
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value > 0)


def axes_by_stride(x: Array) -> tuple[int, ...]:
    """Return the axes of an array from the one with the largest steps to the one with the smallest."""
    return tuple(sorted(range(x.ndim), key=lambda a: (-abs(x.strides[a]), a)))


def with_paired_legs(a: Any, rows: Sequence[int], columns: Sequence[int]) -> Any:
    """Return a matrix as the tensor (m[0], n[0], m[1], n[1], ...), which reads what is sliced and nothing else."""
    if isinstance(a, np.ndarray):  # a view, of a map too: splitting legs never copies
        return pair_legs(a, rows, columns)
    return SplitMatrix(a, rows, columns)


def pair_legs(a: Array, rows: Sequence[int], columns: Sequence[int]) -> Array:
    """Return a matrix as the array (m[0], n[0], m[1], n[1], ...) of legs of these sizes."""
    d = len(rows)
    return a.reshape(*rows, *columns).transpose([k + side for k in range(d) for side in (0, d)])


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
        return pair_legs(out, *([part.stop - part.start for part in parts] for parts in (row_slices, column_slices)))


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
