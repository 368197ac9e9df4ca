"""Pickling of a pass for workers: arrays in files are opened again there."""

from __future__ import annotations

import io
import pickle
from typing import Any

from tnlib._errors import ArgumentError, FileFormatError
from tnlib.out_of_core.array_source import MappedFile, open_mapped_source
from tnlib.out_of_core.tile_executor import TilePass


def pickled_pass(own: TilePass) -> bytes:
    """Return a pass as bytes, or refuse a source that workers cannot open."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, MappedFile):
                return _open_mapped, (value.place(), value.exponent)
            if type(value).__module__.partition(".")[0] == "h5py" and hasattr(value, "file"):
                return _open_hdf5, (own.source.function, own.source.parameter, value.file.filename, value.name)
            return super().reducer_override(value)

    out = io.BytesIO()
    try:
        Pickler(out).dump(own)
    except ArgumentError:
        raise
    except (TypeError, AttributeError, ValueError, RecursionError, pickle.PicklingError) as problem:
        raise ArgumentError(
            f"{own.source.function}: {own.source.parameter} must be an array that workers can open, got one that "
            f"cannot be pickled ({problem}); pass a file, a zarr array or a dask.array."
        ) from None
    return out.getvalue()


def _open_mapped(place: tuple[Any, ...], exponent: int) -> MappedFile:
    source = open_mapped_source(*place)
    source.exponent = exponent
    return source


def _open_hdf5(function: str, parameter: str, file: str, name: str) -> Any:
    import h5py

    try:
        return h5py.File(file, "r")[name]
    except (OSError, KeyError) as problem:
        raise FileFormatError(
            f"{function}: {parameter} must be a dataset that all workers can open, got {problem}; place the file on a "
            "shared file system, and close it where it is written."
        ) from None
