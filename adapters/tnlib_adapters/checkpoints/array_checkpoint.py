"""Checkpoints made from a config and arrays in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tnlib._typing import Array
from tnlib_adapters.architectures.resolve_wiring import wire
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.modified import ChangedTensor
from tnlib_adapters.files.folder import WEIGHTS, Folder
from tnlib_adapters.files.tensor_file import STORED_AS


def checkpoint_of_arrays(function: str, config: Mapping[str, Any], arrays: Mapping[str, Array]) -> Checkpoint:
    """Return a checkpoint that holds `arrays`, by the names of its architecture, as float32.

    `function` is the public function named in messages. `save_checkpoint` writes the checkpoint.
    """
    path = Path(f"({function} in memory)")
    tensors = {name: _stored(path / WEIGHTS, name, array) for name, array in arrays.items()}
    folder = Folder(path, config, tensors, (), {"format": "pt"})
    return Checkpoint(folder, wire(config, tensors, where=str(path), function=function), None)


def _stored(file: Path, name: str, array: Array) -> ChangedTensor:
    n_bytes = array.size * STORED_AS["F32"].itemsize
    return ChangedTensor(file, name, "F32", array.shape, 0, n_bytes, make=functools.partial(_identity, array))


def _identity(array: Array) -> Array:
    return array
