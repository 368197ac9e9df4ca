"""Folder of a run in progress, from which an interrupted run is resumed: its origin, and the blocks that are fitted."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib import ArgumentError, FileFormatError
from tnlib_adapters.compression.methods.out_of_core import entries_of, read_matrices
from tnlib_adapters.factors.config_section import KEY, describe, descriptions
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.files.json_file import JsonFile
from tnlib_adapters.files.tensor_file import is_as_written, read_header, write_digested

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams

Fitted = list[tuple[str, list[FactoredMatrix]]]  # modules and their factored matrices
_FIT, _MATRICES = "fit", "matrices"
_ORIGIN = "tnlib_calibration.json"


class CalibrationFolder:
    """Folder of what a run stores between blocks; a temporary one is removed with the object."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="tnlib-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = folder

    def claim(self, origin: Mapping[str, str]) -> None:
        """Make the folder, if it does not exist, for statistics of this origin.

        Raises
        ------
        ArgumentError
            If it holds other files, or results of another model, text or choice of weights.
        """
        check_run_folder(self.path)
        self.path.mkdir(exist_ok=True)
        file = self.path / _ORIGIN
        if not file.exists():
            hidden = file.with_name(f".{file.name}.partial")
            hidden.write_text(json.dumps(dict(origin)), encoding="utf-8")
            hidden.replace(file)
        elif JsonFile("compress", file, "remove the folder to start anew").read() != dict(origin):
            raise ArgumentError(
                f"compress: the folder of an interrupted run must belong to this model, text and choice of weights, "
                f"got that of others, {self.path}; name another one, or remove it to start anew."
            )


def check_run_folder(folder: Path, out: Path | None = None) -> None:
    """Raise if a folder holds anything but the results of an interrupted run, or lies in OUT."""
    if out is not None and folder.resolve().is_relative_to(out.resolve()):
        raise ArgumentError(
            f"compress: folder (--spill) must lie outside OUT, which is replaced as a whole, got {folder} in {out}; "
            "name another folder."
        )
    if not folder.absolute().parent.is_dir():
        raise ArgumentError(f"compress: folder (--spill) must lie in a folder that exists, got {folder}; name another.")
    if folder.exists() and not (folder.is_dir() and ((folder / _ORIGIN).exists() or not any(folder.iterdir()))):
        raise ArgumentError(
            f"compress: folder (--spill) must be a new folder, an empty one or that of an interrupted run, got "
            f"{folder}; name another one."
        )


def remove_run_folder(folder: Path) -> None:
    """Remove the folder of a run that is done."""
    if (folder / _ORIGIN).exists():
        shutil.rmtree(folder, ignore_errors=True)


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
