"""Calibration statistics on disk: in one file, or by blocks in the folder of a run in progress."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.statistics import Statistics
from tnlib_adapters.compression.methods.out_of_core import StoredArrays
from tnlib_adapters.files.tensor_file import STORED_AS, Entry, TensorInfo, is_as_written, read_header, write_digested

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch
    from tnlib_adapters.instrument.weight_inputs import Places

_FORMAT, _VERSION = "tnlib statistics", "7"
_PARTS = {"reads": "F32", "slopes": "F32", "scales": "F64"}  # dtype of the activations, and of accumulated sums
_BLOCK = 1 << 24  # bytes hashed at a time


def origin_of(checkpoint: Checkpoint, batches: Sequence[Batch], places: Places, longest: int) -> dict[str, str]:
    """Return what identifies statistics: digests of the weight files, of the tokens and of the keys.

    `longest` is the number of tokens at which texts were truncated.
    """
    model = hashlib.sha256()
    for file in sorted({info.file for info in checkpoint.folder.tensors.values()}):
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK):
                model.update(block)
    keys = hashlib.sha256("\n".join(sorted(places)).encode())
    digests = {"model": model.hexdigest(), "text": digest_of_tokens(batches), "weights": keys.hexdigest()}
    return digests | {"window": str(longest)}


def digest_of_tokens(batches: Sequence[Batch]) -> str:
    """Return a digest of the tokens of batches."""
    text = hashlib.sha256()
    for batch in batches:
        for part in (batch.ids, batch.mask):
            text.update(repr(tuple(part.shape)).encode() + part.cpu().numpy().astype("<i8").tobytes())
    return text.hexdigest()


def check_statistics_file(file: Path, out: Path | None = None) -> None:
    """Raise if statistics cannot be saved in `file`, or if it lies in OUT, before any computation."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ArgumentError(
            f"compress: statistics must be a file, to be made in a folder that exists, got {file}; name another."
        )
    if out is not None and file.resolve().is_relative_to(out.resolve()):
        raise ArgumentError(
            f"compress: statistics must lie outside OUT, which is replaced as a whole, got {file} in {out}; "
            "name another file."
        )
    if file.exists():
        _header(file)


class StatisticsFiles:
    """Statistics on disk: one file that is complete, or one file for every group in a folder while they are collected.

    Parameters
    ----------
    folder
        Of the files of groups.
    origin
        Digests of model, text and choice of weights, see `origin_of`.
    file
        File of all groups, to be used again; None for none.
    """

    def __init__(self, folder: Path, origin: Mapping[str, str], file: Path | None = None) -> None:
        self._folder, self.origin, self.file = folder, origin, file
        self._checked = set[int]()  # groups whose files are as they were written

    def is_complete(self) -> bool:
        """Test if the file of all groups exists; raise if it is damaged or belongs to other statistics."""
        if self.file is None or not self.file.exists():
            return False
        _check(self.file, self.origin)
        return True

    def done(self) -> list[int]:
        """Return the groups that are saved; raise if one is damaged or belongs to other statistics."""
        groups = [int(file.stem.removeprefix("group")) for file in self._folder.glob("group*.safetensors")]
        for group in groups:
            if group not in self._checked:
                _check(self._of_group(group), self.origin)
        self._checked.update(groups)
        return groups

    def save(self, group: int, statistics: Statistics) -> None:
        """Save the statistics of a group."""
        entries = [
            Entry(f"{part}.{key}", dtype, _as_stored(values, dtype))
            for part, dtype in _PARTS.items()
            for key, values in _values_of(getattr(statistics, part)).items()
        ]
        write_digested(self._of_group(group), self._metadata, entries)
        self._checked.add(group)

    def statistics(self, keys: Collection[str]) -> Statistics:
        """Return the statistics of these keys, each array read when it is used.

        Raise if a file is damaged.
        """
        if not self.is_complete():
            self.done()
        complete = [self.file] if self.file is not None and self.file.exists() else []
        files = complete or sorted(self._folder.glob("group*.safetensors"))
        tensors = {name: info for file in files for name, info in read_header(file)[0].items()}
        stored = (_below(f"{part}.", tensors) for part in _PARTS)
        return Statistics(*(_Stored({k: own[k] for k in own if k in keys}) for own in stored))

    def join(self) -> None:
        """Write the file of all groups, if there is to be one."""
        if self.file is not None and not self.file.exists():
            tensors = [info for k in self.done() for info in read_header(self._of_group(k))[0].values()]
            write_digested(self.file, self._metadata, [Entry(info.name, info.dtype, info) for info in tensors])

    @property
    def _metadata(self) -> dict[str, str]:
        return {"format": _FORMAT, "version": _VERSION, **self.origin}

    def _of_group(self, group: int) -> Path:
        return self._folder / f"group{group}.safetensors"


def _values_of(arrays: Mapping[str, Array]) -> Mapping[str, Array | TensorInfo]:
    return arrays.entries() if isinstance(arrays, StoredArrays) else arrays


def _as_stored(values: Array | TensorInfo, dtype: str) -> Array | TensorInfo:
    if isinstance(values, TensorInfo):
        return values if values.dtype == dtype else _as_stored(values.read_stored(), dtype)
    return np.ascontiguousarray(values, STORED_AS[dtype])


class _Stored(Mapping[str, Array]):
    """Arrays that are read at every access."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> Array:
        return self._tensors[key].read_stored()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _check(file: Path, origin: Mapping[str, str]) -> None:
    """Raise unless a file holds statistics of this origin, as they were saved."""
    stored = _header(file)
    for part, description in (
        ("model", "another model"),
        ("window", f"--window {stored.get('window')}, this being {origin['window']},"),
        ("text", "another text"),
        ("weights", "another value of what"),
    ):
        if stored.get(part) != origin[part]:
            raise ArgumentError(
                f"compress: statistics must be those of this model on this text, got those of {description} in "
                f"{file}; name another file, or remove it to start anew."
            )
    if not is_as_written(file):
        raise FileFormatError(f"compress: {file} was changed after it was saved; remove it and collect again.")


def _below(prefix: str, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}


def _header(file: Path) -> dict[str, str]:
    try:
        _, stored = read_header(file)
    except FileFormatError:
        stored = {}
    if stored.get("format") != _FORMAT:
        raise FileFormatError(f"compress: {file} holds no statistics written by compress; name another file.")
    if stored.get("version") != _VERSION:
        raise FileFormatError(
            f"compress: {file} holds statistics of version {stored.get('version')}, this is version {_VERSION}; "
            "remove it and collect again."
        )
    return stored
