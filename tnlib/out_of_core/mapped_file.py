"""Memory-mapped files, read by file access instead of their maps."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import is_mapped
from tnlib.out_of_core.array_source import ArraySource, axes_by_stride

_SHORTEST_RUN = 1 << 12  # bytes that are contiguous in a file; shorter runs are copied from the map


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

    def identity(self) -> dict[str, Any]:
        """Return path, size and time of the last change too."""
        description = super().identity() | {"position": self._position}
        if self._file is None:
            return description
        status = os.fstat(self._file)
        return description | {"path": str(self._x.filename), "bytes": status.st_size, "changed": status.st_mtime_ns}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process opens the same numbers."""
        if self._file is None:
            raise ArgumentError(
                f"{self.function}: {self.parameter} must be a map of a file without changes in memory, for workers to "
                f"open it, got mode {getattr(self._x, 'mode', '')!r}; flush it, and open it with mode='r'."
            )
        file = str(Path(self._x.filename).absolute())
        layout = (self._x.dtype.str, self._x.shape, self._x.strides)
        return _reopen, (self.function, self.parameter, file, self._position, *layout), {"exponent": self.exponent}

    def _fetch(self, index: tuple[slice, ...]) -> Array:
        if self._file is not None and os.fstat(self._file).st_size < self._end + self._x.itemsize:
            # reading the map beyond the end of its file would kill the process
            raise self._unreadable(index, f"the end of the file after {os.fstat(self._file).st_size} bytes")
        widths = [part.stop - part.start for part in index]
        runs = _contiguous_axes(self._x, widths)
        if self._file is None or math.prod(widths[a] for a in runs) * self._x.itemsize < _SHORTEST_RUN:
            out = np.array(self._x[index])
            if getattr(self._x, "mode", "") != "c" and hasattr(mmap, "MADV_DONTNEED"):
                self._map.madvise(mmap.MADV_DONTNEED)  # private pages of mode "c" hold the changes of the caller
            return out
        return self._read_runs(index, widths, runs)

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


def _reopen(
    function: str, parameter: str, file: str, position: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
) -> MappedFile:
    """Return the source of the array at a position of a file."""
    if not Path(file).is_file():
        raise ArgumentError(
            f"{function}: {parameter} must be a file that all workers see, got none at {file} on one of them; place it "
            "on a shared file system."
        )
    data = np.memmap(file, np.uint8, "r", offset=position)
    strided: Any = np.ndarray.__new__(np.memmap, shape, np.dtype(dtype), data, 0, strides)
    strided.__array_finalize__(data)  # file and offset
    return MappedFile(function, parameter, strided)


def _contiguous_axes(x: Array, widths: Sequence[int]) -> list[int]:
    """Return the axes, from slow to fast, along which a tile of these widths is one run of bytes."""
    runs: list[int] = []
    expected = x.itemsize
    for a in reversed(axes_by_stride(x)):
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


def open_source(function: str, parameter: str, x: Any) -> ArraySource:
    """Return the source of an array or of anything with shape, dtype and slicing."""
    if is_mapped(x) and not any(step < 0 for step in x.strides):
        return MappedFile(function, parameter, x)
    return ArraySource(function, parameter, x)
