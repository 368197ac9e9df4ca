"""Statistics in a file: whole ones to be used again, others to go on from."""

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
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.projections import NAMES
from tnlib_adapters.checkpoints.tensor_file import Entry, read_header, write_tensor_file
from tnlib_adapters.compression.moments import Moments
from tnlib_adapters.compression.statistics import Save, Statistics

if TYPE_CHECKING:
    from tnlib_adapters.torch.hooks.running import Batch

_FORMAT, _VERSION = "tnlib statistics of attention", "2"
_BLOCK = 1 << 24


def _origin(checkpoint: Checkpoint, batches: Sequence[Batch]) -> dict[str, str]:
    """Return what tells a model and a text from others: digests of its files of weights, and of the tokens."""
    model, text = hashlib.sha256(), hashlib.sha256()
    for file in sorted({info.file for info in checkpoint.folder.tensors.values()}):
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK):
                model.update(block)
    for batch in batches:
        for part in (batch.ids, batch.mask):
            text.update(repr(tuple(part.shape)).encode() + part.numpy().astype("<i8").tobytes())
    return {"model": model.hexdigest(), "text": text.hexdigest()}


def check_statistics_file(file: Path, out: Path) -> None:
    """Raise unless statistics may be kept there, before any work."""
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


def resume(file: Path, checkpoint: Checkpoint, batches: Sequence[Batch]) -> tuple[Statistics, Save]:
    """Return the statistics in a file, new ones where there is none yet, and what puts them there.

    Raises
    ------
    FileFormatError
        If it is another file, or damaged.
    ArgumentError
        If its statistics are those of another model or text.
    """
    of = _origin(checkpoint, batches)
    return _read(file, of) if file.exists() else Statistics(), partial(_write, file, of)


def _read(file: Path, of: Mapping[str, str]) -> Statistics:
    stored = _header(file)
    for what in ("model", "text"):
        if stored.get(what) != of[what]:
            raise ArgumentError(
                f"compress: statistics must be those of this model on this text, got those of another {what} in "
                f"{file}; name another file, or remove it to start anew."
            )
    tensors, _ = read_header(file)
    arrays = {name: info.read() for name, info in tensors.items()}
    try:
        n_read, n_weighed, n_layers = (int(stored[name]) for name in ("read", "weighed", "layers"))
        moments = [Moments.from_arrays(_below(f"{k}.moments.", arrays)) for k in range(n_layers)]
        gates = [{name: arrays[f"{k}.gates.{name}"] for name in NAMES} for k in range(n_layers if n_weighed else 0)]
    except (KeyError, ValueError) as problem:
        raise FileFormatError(f"compress: {file} lacks {problem}; remove it and collect again.") from None
    return Statistics(moments, gates, n_read, n_weighed)


def _write(file: Path, of: Mapping[str, str], found: Statistics) -> None:
    """Put statistics into a file in the place of those before: what is there is always whole."""
    hidden = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "read": str(found.n_read),
        "weighed": str(found.n_weighed),
        "layers": str(len(found.moments)),
        **of,
    }
    try:
        for _ in write_tensor_file(hidden, _entries(found), metadata):
            pass
        hidden.replace(file)
    finally:
        hidden.unlink(missing_ok=True)


def _entries(found: Statistics) -> Iterator[Entry]:
    for k, moments in enumerate(found.moments):
        for name, values in moments.arrays.items():
            yield Entry(f"{k}.moments.{name}", "F32", np.ascontiguousarray(values, dtype="<f4"))
    for k, gates in enumerate(found.gates if found.n_weighed else []):
        for name, values in gates.items():
            yield Entry(f"{k}.gates.{name}", "F64", np.ascontiguousarray(values, dtype="<f8"))


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
