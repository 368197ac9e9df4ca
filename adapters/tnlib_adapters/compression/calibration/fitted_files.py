"""Fitted weights of the blocks in the folder of a run in progress, from which an interrupted fit goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib import FileFormatError
from tnlib_adapters.compression.methods.out_of_core import entries_of, read_matrices
from tnlib_adapters.factors.config_section import KEY, describe, descriptions
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.files.tensor_file import is_as_written, read_header, write_digested

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams

Fitted = list[tuple[str, list[FactoredMatrix]]]  # modules and their factored matrices
_FIT, _MATRICES = "fit", "matrices"


class FittedFiles:
    """One file for every block that is fitted.

    Parameters
    ----------
    streams
        Streams of the run, in its folder.
    attention
        Paths of the attention modules, first to last.
    method, options, n_steps
        What the fit depends on besides model and text: files of another fit are removed.
    """

    def __init__(
        self,
        streams: Streams,
        attention: Sequence[str],
        method: str,
        options: Mapping[str, Sequence[int]],
        n_steps: int,
    ) -> None:
        chosen = json.dumps([method, {name: list(map(int, own)) for name, own in options.items()}, n_steps])
        self._streams, self._folder = streams, streams.folder
        self._attention, self._method = list(attention), method
        self._fit = hashlib.sha256(chosen.encode()).hexdigest()

    def resume(self) -> int:
        """Return the number of blocks that are saved; files of another fit are removed."""
        n = 0
        while self._file(n).exists() and read_header(self._file(n))[1].get(_FIT) == self._fit:
            n += 1
        # the fit of the next block reads the streams after those that are done
        if not n or not self._streams.has(f"truncated-{n}"):
            for old in (*self._folder.glob("fitted*.safetensors"), *self._folder.rglob("truncated-*")):
                old.unlink()
            return 0
        return n

    def save(self, k: int, fitted: Fitted) -> None:
        """Save the weights of a block."""
        named = [(name, [replace(matrix, module=name) for matrix in own]) for name, own in fitted]
        entries = [
            entry._replace(name=f"{at}.{entry.name}") for at, (_, own) in enumerate(named) for entry in entries_of(own)
        ]
        stored = [matrix.describe() for _, own in named for matrix in own]
        metadata = {_FIT: self._fit, _MATRICES: json.dumps({KEY: describe(stored, self._attention, self._method)})}
        write_digested(self._file(k), metadata, entries)

    def read(self, k: int) -> Iterator[tuple[str, list[FactoredMatrix]]]:
        """Yield the weights of a block."""
        file = self._file(k)
        if not is_as_written(file):
            raise FileFormatError(f"compress: {file} was changed after it was saved; remove its folder to start anew.")
        tensors, metadata = read_header(file)
        described = descriptions(json.loads(metadata[_MATRICES]), self._attention) or []
        for at, name in enumerate(dict.fromkeys(description.module for description in described)):
            own = {key.removeprefix(f"{at}."): info for key, info in tensors.items() if key.startswith(f"{at}.")}
            yield name, read_matrices([description for description in described if description.module == name], own)

    def _file(self, k: int) -> Path:
        return self._folder / f"fitted{k}.safetensors"
