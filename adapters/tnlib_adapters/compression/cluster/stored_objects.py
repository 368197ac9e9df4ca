"""Factorised weights in files that workers write and the main process reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tnlib._typing import Array
from tnlib_adapters.files.tensor_file import Entry, TensorInfo, read_header, write_whole_tensor_file


def write_in_place(file: Path, entries: Sequence[Entry]) -> dict[str, TensorInfo]:
    """Write tensors into a file that appears whole, and return where they are."""
    write_whole_tensor_file(file, entries)
    return read_header(file)[0]


class ArraysInFiles(Mapping[str, Array]):
    """Arrays by name, read from files at every access. It is sent to workers without the arrays."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors = dict(tensors)

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name].read_stored()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
