"""Safetensors files with a digest of their contents, which appear whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tnlib_adapters.files.tensor_file import Entry, TensorInfo, read_header, write_whole_tensor_file

_DIGEST = "digest"


def write_digested(file: Path, metadata: Mapping[str, str], entries: Sequence[Entry]) -> None:
    """Write a file atomically, replacing the previous one."""
    write_whole_tensor_file(file, entries, {**metadata, _DIGEST: _digest(metadata, entries)})


def is_as_written(file: Path) -> bool:
    """Test if a file holds what `write_digested` wrote."""
    tensors, metadata = read_header(file)
    entries = [Entry(info.name, info.dtype, info) for info in tensors.values()]
    return metadata.get(_DIGEST) == _digest(metadata, entries)


def _digest(metadata: Mapping[str, str], entries: Sequence[Entry]) -> str:
    """Return a digest of the metadata, but for the digest itself, and of all arrays by name."""
    state = hashlib.sha256(repr(sorted((k, v) for k, v in metadata.items() if k != _DIGEST)).encode())
    for entry in sorted(entries, key=lambda entry: entry.name):
        values = entry.values.read_stored() if isinstance(entry.values, TensorInfo) else entry.values
        state.update(f"{entry.name} {values.dtype.str} {values.shape}".encode())
        state.update(np.ascontiguousarray(values).data)
    return state.hexdigest()
