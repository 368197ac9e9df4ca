"""What the libraries have in common: a missing one is named, a centre is found, files open and appear whole."""

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

# An isometry that was computed is off by a few eps per column; one that was multiplied by 1 + 1e-10 is no isometry.
_ISOMETRIC = 1e4


def find_center(cores: Sequence[Array], claimed: int | None = None) -> int | None:
    """Return a core towards which all others (r, legs ..., r') are isometric, None where there is none.

    Libraries say so themselves, of what a user may have changed since; measuring costs one product per core. Where
    several cores will do, as in product states, it is the claimed one or the first.
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
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no isometry
        return bool(np.linalg.norm(a.conj().T @ a - np.eye(columns)) <= limit)


@contextmanager
def open_hdf5(function: str, path: str | os.PathLike[str]) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the h5py.File that it names; whatever the file breaks inside the block is its own fault."""
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
        what = " ".join(str(problem).split()).strip("'\"")
        raise FileFormatError(
            f"{function}: {file} is damaged or not an HDF5 file of this kind ({type(problem).__name__}: {what}); "
            "it may be cut short, save it again."
        ) from None


def write_hdf5(function: str, path: str | os.PathLike[str], fill: Callable[[Any], None]) -> None:
    """Write the HDF5 file that `fill` makes of an empty h5py.File; it appears whole or not at all."""
    target = as_target(function, path)
    h5py = import_optional(function, "h5py", "h5py")
    with h5py.File("in memory", "w", driver="core", backing_store=False) as made:
        fill(made)
        made.flush()
        image = made.id.get_file_image()
    write_whole(target, image)
