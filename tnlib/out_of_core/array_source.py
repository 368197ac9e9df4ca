"""Arrays that are read by slices: memory-mapped files, zarr arrays, h5py datasets and anything alike."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from tnlib._errors import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib._validate import as_numbers
from tnlib.linalg.scaling import shift
from tnlib.out_of_core.split_matrix import with_paired_legs

Tile: TypeAlias = tuple[tuple[int, int], ...]  # start and stop along every axis

_SHORTEST_RUN = 1 << 12  # bytes that are contiguous in a file; shorter runs are copied from the map


def is_sliced(x: Any) -> bool:
    """Test if `x` is no array in memory, and has shape, dtype and slicing."""
    if isinstance(x, np.ndarray):
        return isinstance(x, np.memmap) and getattr(x, "_mmap", None) is not None
    if hasattr(x, "toarray"):  # sparse; `to_numpy` refuses it with advice
        return False
    described = isinstance(getattr(x, "shape", None), tuple) and isinstance(getattr(x, "dtype", None), np.dtype)
    return described and hasattr(type(x), "__getitem__")


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
        out = open_source(self.function, self.parameter, with_paired_legs(self._x, rows, columns))
        out.on_workers = self.on_workers
        return out

    def rechunk_advice(self, whole: Collection[int]) -> str:
        """Return the call that makes chunks with the axes `whole` undivided."""
        chunks = ", ".join(f"{a}: {-1 if a in whole else repr('auto')}" for a in range(len(self.shape)))
        return f"{self.parameter}.rechunk({{{chunks}}})"

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
        return tuple(range(len(self.shape)))

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
        except (OSError, RuntimeError) as problem:  # h5py, zarr
            raise self._unreadable(index, problem) from problem

    def _unreadable(self, index: tuple[slice, ...], problem: object) -> FileFormatError:
        where = ", ".join(f"{part.start}:{part.stop}" for part in index)
        return FileFormatError(
            f"{self.function}: {self.parameter} must be readable to its end, got {problem} at [{where}]; "
            "the storage may be cut short, write it again."
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value > 0)


class ArrayInMemory(ArraySource):
    """An array in memory, in any order, read without a copy."""

    @property
    def axes_by_stride(self) -> tuple[int, ...]:
        """Axes from the one with the largest steps in storage to the contiguous one."""
        return _axes_by_stride(self._x)


class MappedFile(ArraySource):
    """A numpy.memmap, read from its file instead of its map, whose pages would count as resident memory.

    Slices, transposes and other views of a map are read in the same way. Runs of few contiguous bytes are copied from
    the map, and its pages released.
    """

    def __init__(self, function: str, parameter: str, x: Array) -> None:
        super().__init__(function, parameter, x)
        base: Any = x
        while isinstance(base, np.ndarray):
            base = base.base
        self._map: mmap.mmap = base
        start = np.frombuffer(base, np.uint8).__array_interface__["data"][0]
        offset: int = x.offset  # type: ignore[attr-defined]
        self._position = offset - offset % mmap.ALLOCATIONGRANULARITY + x.__array_interface__["data"][0] - start
        self._end = self._position + sum((n - 1) * max(0, step) for n, step in zip(x.shape, x.strides, strict=True))
        self._file = _open_same_file(x, self._position)
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)

    @property
    def axes_by_stride(self) -> tuple[int, ...]:
        """Axes from the one with the largest steps in storage to the contiguous one."""
        return _axes_by_stride(self._x)

    def identity(self) -> dict[str, Any]:
        """Return path, size and time of the last change too."""
        description = super().identity() | {"position": self._position}
        if self._file is None:
            return description
        status = os.fstat(self._file)
        return description | {"path": str(self._x.filename), "bytes": status.st_size, "changed": status.st_mtime_ns}

    def place(self) -> tuple[str, str, str, int, str, tuple[int, ...], tuple[int, ...]]:
        """Return the arguments of `open_mapped_source`, with which another process opens the same numbers."""
        if self._file is None:
            raise ArgumentError(
                f"{self.function}: {self.parameter} must be a map of a file without changes in memory, for workers to "
                f"open it, got mode {getattr(self._x, 'mode', '')!r}; flush it, and open it with mode='r'."
            )
        file = str(Path(self._x.filename).absolute())
        return self.function, self.parameter, file, self._position, self._x.dtype.str, self._x.shape, self._x.strides

    def _fetch(self, index: tuple[slice, ...]) -> Array:
        if self._file is not None and os.fstat(self._file).st_size < self._end + self._x.itemsize:
            # reading the map beyond the end of its file would kill the process
            raise self._unreadable(index, f"the end of the file after {os.fstat(self._file).st_size} bytes")
        widths = [part.stop - part.start for part in index]
        runs = _contiguous_axes(self._x, widths)
        if self._file is None or math.prod(widths[a] for a in runs) * self._x.itemsize < _SHORTEST_RUN:
            return self._copy_from_map(index)
        return self._read_runs(index, widths, runs)

    def _copy_from_map(self, index: tuple[slice, ...]) -> Array:
        out = np.array(self._x[index])
        if getattr(self._x, "mode", "") != "c" and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # private pages of mode "c" hold the changes of the caller
        return out

    def _read_runs(self, index: tuple[slice, ...], widths: Sequence[int], runs: Sequence[int]) -> Array:
        """Read the runs along the axes `runs`, from slow to fast, one for each index of the other axes."""
        file = cast(int, self._file)
        outer = [a for a in self.axes_by_stride if a not in runs and widths[a] > 1]
        rest = [a for a in range(len(widths)) if a not in runs and a not in outer]
        order = [*rest, *outer, *runs]
        buffer = np.empty([widths[a] for a in order], self._x.dtype)
        strides = self._x.strides
        first = self._position + sum(part.start * step for part, step in zip(index, strides, strict=True))
        offsets = np.zeros((), np.int64)
        for a in outer:
            offsets = np.add.outer(offsets, np.arange(widths[a], dtype=np.int64) * strides[a])
        flat = memoryview(buffer.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        length = len(flat) // offsets.size
        for k, offset in enumerate(offsets.reshape(-1).tolist()):
            n_read = _read_at(file, flat[k * length : (k + 1) * length], first + offset)
            if n_read < length:
                raise self._unreadable(index, f"the end of the file after {first + offset + n_read} bytes")
        return buffer.transpose(np.argsort(order))


def open_mapped_source(
    function: str, parameter: str, file: str, position: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
) -> MappedFile:
    """Return the source of the array at a position of a file, see `MappedFile.place`."""
    if not Path(file).is_file():
        raise ArgumentError(
            f"{function}: {parameter} must be a file that all workers see, got none at {file} on one of them; place it "
            "on a shared file system."
        )
    data = np.memmap(file, np.uint8, "r", offset=position)
    strided: Any = np.ndarray.__new__(np.memmap, shape, np.dtype(dtype), data, 0, strides)
    strided.__array_finalize__(data)  # file and offset
    return MappedFile(function, parameter, strided)


def _axes_by_stride(x: Array) -> tuple[int, ...]:
    return tuple(sorted(range(x.ndim), key=lambda a: (-abs(x.strides[a]), a)))


def _contiguous_axes(x: Array, widths: Sequence[int]) -> list[int]:
    """Return the axes, from slow to fast, along which a tile of these widths is one run of bytes."""
    runs: list[int] = []
    expected = x.itemsize
    for a in reversed(_axes_by_stride(x)):
        if widths[a] == 1:
            continue
        if x.strides[a] != expected:
            break
        runs.insert(0, a)
        expected *= widths[a]
    return runs


def _open_same_file(x: Any, position: int) -> int | None:
    """Return a descriptor of the file of a map, None where it cannot replace the map: private changes, another file."""
    if x.filename is None or x.mode == "c" or not Path(x.filename).is_file():
        return None
    file = os.open(x.filename, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    start = bytearray(x.itemsize)
    if _read_at(file, memoryview(start), position) == len(start) and bytes(start) == x[(slice(1),) * x.ndim].tobytes():
        return file
    os.close(file)
    return None


def _read_at(file: int, buffer: memoryview, position: int) -> int:
    """Fill `buffer` from a position of the file; return the number of bytes that there were."""
    done = 0
    while done < len(buffer):
        if hasattr(os, "preadv"):
            count = os.preadv(file, [buffer[done:]], position + done)
        else:  # Windows
            os.lseek(file, position + done, os.SEEK_SET)
            part = os.read(file, len(buffer) - done)
            count = len(part)
            buffer[done : done + count] = part
        if count == 0:
            break
        done += count
    return done


def matrix_shape(source: ArraySource) -> tuple[int, int]:
    """Return the shape of a source with two legs, and refuse any other."""
    if len(source.shape) != 2:
        raise ArgumentError(
            f"{source.function}: {source.parameter} must have 2 legs, got shape {source.shape}; reshape it first."
        )
    return source.shape[0], source.shape[1]


def open_source(function: str, parameter: str, x: Any) -> ArraySource:
    """Return the source of an array or of anything with shape, dtype and slicing."""
    if isinstance(x, np.memmap) and is_sliced(x) and not any(step < 0 for step in x.strides):
        return MappedFile(function, parameter, x)
    return ArrayInMemory(function, parameter, x) if isinstance(x, np.ndarray) else ArraySource(function, parameter, x)
