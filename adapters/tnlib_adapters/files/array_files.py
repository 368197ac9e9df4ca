"""Arrays in files of numpy, zarr and HDF5, opened without being read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, FileFormatError, MissingFileError
from tnlib._validate import import_optional

_HDF5 = (".h5", ".hdf5", ".hdf", ".nc")


@contextlib.contextmanager
def open_array(function: str, name: str | os.PathLike[str]) -> Iterator[Any]:
    """Yield the array in X.npy, in the folder X.zarr, or in X.h5:/path/of/the/dataset."""
    text = os.fspath(name)
    file, colon, inner = text.rpartition(":")
    path = Path(file if colon and Path(file).suffix.lower() in _HDF5 else text)
    if not path.exists():
        raise MissingFileError(f"{function}: the array must be in a file or folder, found none at {path}.")
    suffix = path.suffix.lower()
    if suffix == ".npy":
        yield _open_npy(function, path)
    elif suffix in _HDF5:
        with _open_hdf5(function, path, inner if path != Path(text) else "") as dataset:
            yield dataset
    elif suffix == ".zarr" or (path.is_dir() and any((path / key).exists() for key in ("zarr.json", ".zarray"))):
        yield _open_zarr(function, path)
    else:
        raise ArgumentError(
            f"{function}: the array must be in X.npy, X.zarr or X.h5:/path, got {path.name}; convert it first."
        )


def _open_npy(function: str, path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as problem:
        raise FileFormatError(f"{function}: {path} is not a whole npy file ({problem}); save it again.") from None


@contextlib.contextmanager
def _open_hdf5(function: str, path: Path, inner: str) -> Iterator[Any]:
    h5py = import_optional(function, "h5py", "h5py")
    try:
        file = h5py.File(path, "r")
    except OSError as problem:
        raise FileFormatError(f"{function}: {path} is not a whole HDF5 file ({problem}); save it again.") from None
    with file:
        dataset = file.get(inner) if inner else None
        if not isinstance(dataset, h5py.Dataset):
            names: list[str] = []
            file.visititems(lambda name, item: names.append(f"/{name}") if isinstance(item, h5py.Dataset) else None)
            raise ArgumentError(
                f"{function}: the file must be followed by the path of a dataset, as {path.name}:"
                f"{(names or ['/x'])[0]}, got {inner or 'none'}; it holds {', '.join(names[:10]) or 'no dataset'}."
            )
        yield dataset


def _open_zarr(function: str, path: Path) -> Any:
    zarr = import_optional(function, "zarr", "zarr")
    try:
        opened = zarr.open(path, mode="r")
    except (OSError, ValueError, KeyError) as problem:
        raise FileFormatError(f"{function}: {path} is not a zarr array ({problem}); save it again.") from None
    if not hasattr(opened, "shape"):
        names = [f"{path.name}/{key}" for key in opened.array_keys()]
        raise ArgumentError(
            f"{function}: the folder must be a zarr array, got a group; pass one of {', '.join(names[:10]) or 'none'}."
        )
    return opened
