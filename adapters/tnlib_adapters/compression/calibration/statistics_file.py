"""Save and resume calibration statistics in a file."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.statistics import Save, Statistics
from tnlib_adapters.files.tensor_file import STORED_AS, Entry, read_header, write_tensor_file

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch
    from tnlib_adapters.instrument.weight_inputs import Places

_FORMAT, _VERSION = "tnlib statistics", "3"
_PARTS = {"reads": "F32", "slopes": "F32", "gates": "F64"}  # dtype of the activations, and of accumulated sums
_BLOCK = 1 << 24


def _origin(checkpoint: Checkpoint, batches: Sequence[Batch], places: Places) -> dict[str, str]:
    """Return digests that identify statistics: of the weight files, of the tokens, and of the keys."""
    model, text = hashlib.sha256(), hashlib.sha256()
    for file in sorted({info.file for info in checkpoint.folder.tensors.values()}):
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK):
                model.update(block)
    for batch in batches:
        for part in (batch.ids, batch.mask):
            text.update(repr(tuple(part.shape)).encode() + part.numpy().astype("<i8").tobytes())
    keys = hashlib.sha256("\n".join(sorted(places)).encode())
    return {"model": model.hexdigest(), "text": text.hexdigest(), "weights": keys.hexdigest()}


def check_statistics_file(file: Path, out: Path) -> None:
    """Raise if statistics cannot be saved in `file`, before any computation."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ArgumentError(
            f"compress: statistics must be a file, to be made in a folder that exists, got {file}; name another."
        )
    if file.resolve().is_relative_to(out.resolve()):
        raise ArgumentError(
            f"compress: statistics must lie outside OUT, which is replaced as a whole, got {file} in {out}; "
            "name another file."
        )
    if file.exists():
        _header(file)


def resume(file: Path, checkpoint: Checkpoint, batches: Sequence[Batch], places: Places) -> tuple[Statistics, Save]:
    """Return the statistics of these weights from a file, or new ones if it does not exist, and the save function.

    Raises
    ------
    FileFormatError
        If the file has another format, or is damaged.
    ArgumentError
        If its statistics belong to another model, text or choice of weights.
    """
    origin = _origin(checkpoint, batches, places)
    return _read(file, origin, places) if file.exists() else Statistics(), partial(_write, file, origin)


def _read(file: Path, origin: Mapping[str, str], places: Places) -> Statistics:
    stored = _header(file)
    for part, description in (
        ("model", "another model"),
        ("text", "another text"),
        ("weights", "another choice of what"),
    ):
        if stored.get(part) != origin[part]:
            raise ArgumentError(
                f"compress: statistics must be those of this model on this text, got those of {description} in "
                f"{file}; name another file, or remove it to start anew."
            )
    tensors, _ = read_header(file)
    arrays = {name: info.read() for name, info in tensors.items()}
    try:
        n_read, n_weighed = (int(stored[name]) for name in ("read", "weighed"))
    except (KeyError, ValueError) as problem:
        raise FileFormatError(f"compress: {file} lacks {problem}; remove it and collect again.") from None
    expected = [f"reads.{place.reads}" for place in places.values()] + [f"slopes.{key}" for key in places]
    expected += [f"gates.{key}" for key in places] if n_weighed else []
    lacking = [name for name in expected if name not in arrays]
    if lacking:
        raise FileFormatError(f"compress: {file} lacks {lacking[0]!r}; remove it and collect again.")
    reads, slopes, gates = (_below(f"{part}.", arrays) for part in _PARTS)
    return Statistics(reads, slopes, gates, n_read, n_weighed)


def _write(file: Path, origin: Mapping[str, str], statistics: Statistics) -> None:
    """Write statistics atomically, replacing the previous file."""
    hidden = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "read": str(statistics.n_read),
        "weighed": str(statistics.n_weighed),
        **origin,
    }
    try:
        for _ in write_tensor_file(hidden, _entries(statistics), metadata):
            pass
        hidden.replace(file)
    finally:
        hidden.unlink(missing_ok=True)


def _entries(statistics: Statistics) -> Iterator[Entry]:
    for part, dtype in _PARTS.items():
        for key, values in getattr(statistics, part).items():
            yield Entry(f"{part}.{key}", dtype, np.ascontiguousarray(values, STORED_AS[dtype]))


def _below(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}


def _header(file: Path) -> dict[str, str]:
    try:
        _, stored = read_header(file)
    except FileFormatError:
        stored = {}
    if stored.get("format") != _FORMAT:
        raise FileFormatError(f"compress: {file} holds no statistics that compress has written; name another file.")
    if stored.get("version") != _VERSION:
        raise FileFormatError(
            f"compress: {file} holds statistics of version {stored.get('version')}, this is version {_VERSION}; "
            "remove it and collect again."
        )
    return stored
