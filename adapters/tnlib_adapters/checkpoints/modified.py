"""Checkpoints with tensors computed from others on reading, so that a model need not fit in memory; writing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_checkpoint, wire_folder
from tnlib_adapters.files.atomic_folder import check_target, whole_folder
from tnlib_adapters.files.folder import write_folder
from tnlib_adapters.files.safetensors_file import (
    STORED_AS,
    ComputedTensor,
    Entry,
    TensorInfo,
    check_finite,
    encode,
)


@dataclass(frozen=True)
class ChangedTensor(ComputedTensor):
    """A tensor computed in float64 on reading; stored as F64 if the original tensor is, otherwise as F32."""

    make: Callable[[], Array] = field(kw_only=True)

    def read_stored(self) -> Array:
        """Compute the numbers in the stored dtype."""
        with np.errstate(over="ignore"):  # reported by `check_finite` with the name of the tensor
            values = encode(self.make(), self.dtype)
        check_finite(self.name, self.file, values)
        return values


def with_tensors(
    checkpoint: Checkpoint, changes: Mapping[str, Callable[[], Array]], config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Return a checkpoint in which `changes` replace or add tensors; each is computed in float64 on reading."""
    old = checkpoint.folder.tensors
    new = {
        name: _changed(old[name], make) if name in old else _added(checkpoint, name, make)
        for name, make in changes.items()
    }
    new_config = {**checkpoint.config, **(config or {})}
    if any(old[name].dtype in ("F16", "BF16") for name in changes if name in old):
        new_config |= {
            key: "float32" for key in ("dtype", "torch_dtype") if key in new_config
        }  # otherwise transformers rounds them to half precision
    folder = replace(checkpoint.folder, tensors={**old, **new}, config=new_config)
    return replace(checkpoint, folder=folder, wiring=wire_folder(folder))


def wide(checkpoint: Checkpoint, name: str) -> Array:
    """Read one tensor, by its full name, in float64."""
    return checkpoint.folder.tensors[name].read_finite().astype(np.float64)


@accepts_models
def save_checkpoint(checkpoint: Checkpoint, out: Path | str, *, force: bool = False) -> None:
    """Write a checkpoint, for example from `fold` or `rotate`, into a folder, atomically.

    Parameters
    ----------
    checkpoint
        Any checkpoint; its tokenizer and other small files are copied unchanged.
    out
        Path of a new or empty folder.
    force
        Replace `out` if it is not empty.

    Raises
    ------
    ArgumentError
        If `out` is not empty, or inside the folder of `checkpoint`.

    Examples
    --------
    >>> import tempfile, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> with tempfile.TemporaryDirectory() as out:
    ...     save_checkpoint(model, out)
    ...     tnlib_adapters.open_checkpoint(out).n_layers
    2
    """
    checkpoint = as_checkpoint("save_checkpoint", checkpoint)
    target = as_path("save_checkpoint", "out", out)
    check_target("save_checkpoint", target, checkpoint.folder.path, force=force)
    tensors: dict[str, list[Entry]] = {}
    for name, info in checkpoint.folder.tensors.items():
        tensors.setdefault(info.file.name, []).append(Entry(name, info.dtype, info))
    with whole_folder(target) as partial:
        for _ in write_folder(checkpoint.folder, tensors, checkpoint.config, partial):
            pass


def _changed(old: TensorInfo, make: Callable[[], Array]) -> ChangedTensor:
    dtype = "F64" if old.dtype == "F64" else "F32"
    return ChangedTensor(old.file, old.name, dtype, old.shape, 0, old.size * STORED_AS[dtype].itemsize, make=make)


def _added(checkpoint: Checkpoint, name: str, make: Callable[[], Array]) -> ChangedTensor:
    """Return a new tensor beside the embeddings, of their shape and dtype."""
    table = checkpoint.folder.tensors[checkpoint.wiring.embedding.table.weight]
    return replace(_changed(table, make), name=name)
