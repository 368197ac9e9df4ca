"""Decompositions of array files, written with `tnlib.save`, and descriptions of both kinds of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tnlib.formats.cp.decomposition as cp
import tnlib.formats.matrix.svd as svd
import tnlib.formats.train.tt_svd as train
import tnlib.formats.tucker.hosvd as tucker
from tnlib._errors import ArgumentError
from tnlib._fit import Fit
from tnlib._validate import as_target
from tnlib.io import load, save
from tnlib.out_of_core.passes import observed_passes
from tnlib.out_of_core.storage import Storage
from tnlib_adapters.files.array_files import open_array

FORMATS: dict[str, Callable[..., Fit[Any]]] = {
    "tt": train.tt_svd,
    "tucker": tucker.tucker,
    "svd": svd.svd,
    "cp": cp.cp,
}


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
    """Decompose the array in a file and write the result to `out`; return its `Fit`.

    Parameters
    ----------
    source
        X.npy, the folder X.zarr, or X.h5:/path/of/the/dataset; larger than memory or not.
    out
        File to write, read by `tnlib.load`.
    format
        "tt", "tucker", "svd" or "cp".
    memory, folder
        Those of `tnlib.Storage`.
    force
        Replace `out` if it exists.
    progress
        Called with the name of a pass, the tiles that are done, and their number.
    **options
        `rtol`, `max_rank` or `rank` of the function of the format; None is left out.
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
    with open_array("decompose", source) as array, observed_passes(progress or _ignore):
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
        shape, count = " x ".join(map(str, array.shape)), int(array.size) * array.dtype.itemsize
        lines = [f"array, shape {shape}, {array.dtype}, {count:,} bytes"]
        return "\n".join(lines + ([f"chunks {' x '.join(map(str, chunks))}"] if chunks else []))


def _ignore(stage: str, done: int, total: int) -> None:
    pass
