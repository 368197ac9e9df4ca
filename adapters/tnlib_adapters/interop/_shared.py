"""Shared helpers of the interop modules: find the orthogonality centre, open and write HDF5 files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tnlib._errors import FileFormatError, MissingFileError
from tnlib._files import write_whole
from tnlib._typing import Array
from tnlib._validate import as_path, as_target, import_optional

# A computed isometry is off by a few eps per column; one multiplied by 1 + 1e-10 must not pass.
_ISOMETRIC = 1e4


def find_center(cores: Sequence[Array], claimed: int | None = None) -> int | None:
    """Return the index of an orthogonality centre of cores (r, legs ..., r'), None if there is none.

    Other libraries store the centre, but the user may have changed the cores since; the test costs one product per
    core. If several cores qualify, as in product states, return the claimed one or the first.
    """
    last = len(cores) - 1
    start = last  # all cores after it are right-isometric
    while start > 0 and _is_isometry(cores[start].reshape(len(cores[start]), -1).T):
        start -= 1
    stop = 0  # all cores before it are left-isometric
    while stop < last and _is_isometry(cores[stop].reshape(-1, cores[stop].shape[-1])):
        stop += 1
    if stop < start:
        return None
    return claimed if claimed is not None and start <= claimed <= stop else start


def _is_isometry(a: Array) -> bool:
    columns = a.shape[1]
    if columns > len(a):
        return False
    limit = _ISOMETRIC * np.finfo(a.dtype).eps * np.sqrt(columns)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is not an isometry
        return bool(np.linalg.norm(a.conj().T @ a - np.eye(columns)) <= limit)


@contextmanager
def open_hdf5(function: str, path: str | os.PathLike[str]) -> Iterator[tuple[Path, Any]]:
    """Yield path and h5py.File; errors inside the block are reported as a damaged file."""
    file = as_path(function, "path", path)
    h5py = import_optional(function, "h5py", "h5py")
    if not file.is_file():
        raise MissingFileError(f"{function}: path must be an HDF5 file, found none at {file}.")
    try:
        with h5py.File(file, "r") as opened:
            yield file, opened
    except (PermissionError, FileFormatError):
        raise
    except (
        *(OSError, RuntimeError, KeyError, IndexError, AttributeError),
        *(TypeError, ValueError, OverflowError, MemoryError),
    ) as problem:
        reason = " ".join(str(problem).split()).strip("'\"")
        raise FileFormatError(
            f"{function}: {file} is damaged or not an HDF5 file of this kind ({type(problem).__name__}: {reason}); "
            "it may be cut short, save it again."
        ) from None


def write_hdf5(function: str, path: str | os.PathLike[str], fill: Callable[[Any], None]) -> None:
    """Write atomically an HDF5 file with the contents that `fill` adds to an empty h5py.File."""
    target = as_target(function, path)
    h5py = import_optional(function, "h5py", "h5py")
    with h5py.File("in memory", "w", driver="core", backing_store=False) as file_in_memory:
        fill(file_in_memory)
        file_in_memory.flush()
        image = file_in_memory.id.get_file_image()
    write_whole(target, image)
