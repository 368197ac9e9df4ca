"""Arrays in files of numpy, zarr and HDF5: opened without being read, described, and decomposed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tnlib.formats.cp.decomposition as cp
import tnlib.formats.matrix.svd as svd
import tnlib.formats.train.tt_svd as train
import tnlib.formats.tucker.hosvd as tucker
from tnlib._errors import ArgumentError, FileFormatError, MissingFileError, in_one_line
from tnlib._fit import Fit
from tnlib._validate import as_target, import_optional
from tnlib.io import load, save
from tnlib.out_of_core.passes import observed_passes
from tnlib.out_of_core.storage import Storage

_HDF5 = (".h5", ".hdf5", ".hdf", ".nc")
FORMATS: dict[str, Callable[..., Fit[Any]]] = {
    "tt": train.tt_svd,
    "tucker": tucker.tucker,
    "svd": svd.svd,
    "cp": cp.cp,
}


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
        is_model = (path / "config.json").exists()
        advice = "tnlib inspect reads models, and tnlib_report.html has their sizes" if is_model else "convert it first"
        raise ArgumentError(f"{function}: the array must be in X.npy, X.zarr or X.h5:/path, got {path.name}; {advice}.")


def _open_npy(function: str, path: Path) -> Any:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as problem:  # whatever a header makes the parser raise
        raise FileFormatError(
            f"{function}: {path} is not a whole npy file ({in_one_line(problem)}); save it again."
        ) from None


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
        is_array = hasattr(opened, "shape")
        names = [] if is_array else [f"{path.name}/{key}" for key in opened.array_keys()]
        np.dtype(opened.dtype if is_array else "f8").itemsize  # noqa: B018  zarr has dtypes that numpy lacks
    except Exception as problem:  # whatever the metadata make zarr raise
        raise FileFormatError(
            f"{function}: {path} is not a zarr array ({in_one_line(problem)}); save it again."
        ) from None
    if not is_array:
        raise ArgumentError(
            f"{function}: the folder must be a zarr array, got a group; pass one of {', '.join(names[:10]) or 'none'}."
        )
    return opened


def decompose_file(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str = "tt",
    memory: float | None = None,
    folder: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Fit[Any]:
    """Decompose the array in a file, see `open_array`, and write the result to `out`; return its `Fit`.

    `format` is a key of `FORMATS`, whose functions take the options; those that are None are left out. `memory` and
    `folder` are those of `tnlib.Storage`. `force` replaces `out`. `progress` is called with the name of a pass, the
    tiles that are done, and their number.
    """
    target = as_target("decompose", out)
    if target.exists() and not force:
        raise ArgumentError(f"decompose: OUT must not exist, got {target}; pass another name or --force.")
    settings = {key: value for key, value in options.items() if value is not None}
    if format == "cp" and "rank" not in settings:
        raise ArgumentError("decompose: --format cp needs a number of components, got none; pass --rank.")
    if format != "cp" and "rank" in settings:
        raise ArgumentError(f"decompose: --rank is that of --format cp, got {format}; pass --max-rank.")
    storage = Storage(memory=memory, folder=folder)
    observed = observed_passes(progress) if progress else contextlib.nullcontext()
    with open_array("decompose", source) as array, observed:
        fit = FORMATS[format](array, storage=storage, **settings)
    save(target, fit.value)
    return fit


def describe_file(path: str | os.PathLike[str]) -> str:
    """Return a line or more on a file of `tnlib.save`, or on an array file."""
    if Path(path).suffix == ".safetensors":
        value = load(path)
        return f"{value!r}\nnorm {value.norm():.6g}"
    with open_array("info", path) as array:
        chunks = getattr(array, "chunks", None)
        shape, count = " x ".join(map(str, array.shape)), math.prod(array.shape) * array.dtype.itemsize
        lines = [f"array, shape {shape}, {array.dtype}, {count:,} bytes"]
        return "\n".join(lines + ([f"chunks {' x '.join(map(str, chunks))}"] if chunks else []))
