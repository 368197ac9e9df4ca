"""A checkpoint with some tensors computed from others: each when it is read, so that a model need not fit in memory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.files.folder import CONFIG, INDEX, PICKLED
from tnlib_adapters.files.tensor_file import (
    STORED_AS,
    Entry,
    TensorInfo,
    check_finite,
    encode,
    write_tensor_file,
)

_WEIGHTS = (*PICKLED, ".safetensors", ".h5", ".msgpack", ".onnx", ".gguf")


@dataclass(frozen=True)
class ChangedTensor(TensorInfo):
    """A tensor that is computed, in double precision; F64 where what it stands for is, and F32 otherwise."""

    make: Callable[[], Array] = field(kw_only=True)

    def read_stored(self) -> Array:
        """Compute the numbers, as they are to be stored."""
        with np.errstate(over="ignore"):  # seen below, where the tensor has a name
            values = encode(self.make(), self.dtype)
        check_finite(self.name, self.file, values)
        return values

    def read(self) -> Array:
        """Compute the numbers."""
        return self.read_stored()

    def read_part(self, index: tuple[slice, ...]) -> Array:
        """Compute all numbers and return some."""
        return self.read_stored()[index]


def with_tensors(
    checkpoint: Checkpoint, changes: Mapping[str, Callable[[], Array]], config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Return a checkpoint in which these tensors are computed; `changes` read from the old one, in double precision."""
    old = checkpoint.folder.tensors
    new = {
        name: _changed(old[name], make) if name in old else _added(checkpoint, name, make)
        for name, make in changes.items()
    }
    told = {**checkpoint.config, **(config or {})}
    if any(old[name].dtype in ("F16", "BF16") for name in changes if name in old):
        told |= {key: "float32" for key in ("dtype", "torch_dtype") if key in told}  # or transformers rounds them again
    return replace(checkpoint, folder=replace(checkpoint.folder, tensors={**old, **new}, config=told))


def wide(checkpoint: Checkpoint, name: str) -> Array:
    """Read one tensor, by its full name, in double precision."""
    return checkpoint.folder.tensors[name].read_finite().astype(np.float64)


def save_checkpoint(checkpoint: Checkpoint, out: Path | str) -> None:
    """Write a checkpoint, as `fold` and `rotate` return it, into a new folder that opens like any other.

    Parameters
    ----------
    checkpoint
        Any; its tokenizer and other small files are copied as they are.
    out
        Path of a folder that does not exist, or is empty.

    Raises
    ------
    ArgumentError
        If `out` holds something.

    Examples
    --------
    >>> import tempfile, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> with tempfile.TemporaryDirectory() as out:
    ...     save_checkpoint(model, out)
    ...     tnlib_adapters.open_checkpoint(out).n_layers
    2
    """
    folder = as_path("save_checkpoint", "out", out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(f"save_checkpoint: out must be a new or an empty folder, got {folder}; choose another.")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint.folder.tensors
    weight_map = {name: info.file.name for name, info in tensors.items()}
    for file in sorted(set(weight_map.values())):
        entries = [Entry(name, info.dtype, info) for name, info in tensors.items() if info.file.name == file]
        for _ in write_tensor_file(folder / file, entries, checkpoint.folder.metadata or {"format": "pt"}):
            pass
    if (checkpoint.folder.path / INDEX).is_file():
        total = sum(info.size * STORED_AS[info.dtype].itemsize for info in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(dict(checkpoint.config), indent=2) + "\n", encoding="utf-8")
    for file_there in checkpoint.folder.path.iterdir():
        known = file_there.name in (CONFIG, INDEX) or file_there.suffix in _WEIGHTS or file_there.name[0] == "."
        if file_there.is_file() and not known:
            shutil.copyfile(file_there, folder / file_there.name)


def _changed(old: TensorInfo, make: Callable[[], Array]) -> ChangedTensor:
    return _tensor(old.file, old.name, "F64" if old.dtype == "F64" else "F32", old.shape, make)


def _added(checkpoint: Checkpoint, name: str, make: Callable[[], Array]) -> ChangedTensor:
    """Return a new tensor beside the embeddings, of their shape and dtype."""
    table = checkpoint.prefix + checkpoint.architecture.embeddings[0] + ".weight"
    return replace(_changed(checkpoint.folder.tensors[table], make), name=name)


def _tensor(file: Path, name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], Array]) -> ChangedTensor:
    n_bytes = math.prod(shape) * STORED_AS[dtype].itemsize
    return ChangedTensor(file, name, dtype, shape, 0, n_bytes, make=make)
