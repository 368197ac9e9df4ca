"""Calibration statistics of a running model over text: collected, saved in a file and resumed.

They are input moments, moments of output gradients, and gate derivatives of the components of a weight.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.components import Components, Moments, second_moments
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.factors.projections import NAMES
from tnlib_adapters.files.tensor_file import STORED_AS, Entry, read_header, write_tensor_file

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import Place, Places

_SEED = 0
_SAVED_EVERY = 10.0  # seconds
_FORMAT, _VERSION = "tnlib statistics", "4"
_PARTS = {"reads": "F32", "slopes": "F32", "gates": "F64"}  # dtype of the activations, and of accumulated sums
_BLOCK = 1 << 24  # bytes hashed at a time


@dataclass
class Statistics:
    """Calibration statistics of the first batches of a text, by weight keys; collection can be resumed.

    Parameters
    ----------
    reads
        By input key: sums over tokens of x x^T; for an embedding table the token counts.
    slopes
        Sums of p p^T with the gradient p of a probe at the output; for an unembedding at the input, because the output
        is as wide as the vocabulary. Both over `n_read` batches.
    gates
        Sums of squares of the derivative with respect to a gate on each component, over `n_weighed` batches.
    n_read, n_weighed
        Number of batches so far.
    """

    reads: dict[str, Array] = field(default_factory=dict)
    slopes: dict[str, Array] = field(default_factory=dict)
    gates: dict[str, Array] = field(default_factory=dict)
    n_read: int = 0
    n_weighed: int = 0

    def of_layer(self, k: int) -> Moments:
        """Return the moments of the attention of one layer."""
        return Moments(self.reads[f"{k}.x"], self.reads[f"{k}.y"], {n: self.slopes[f"{k}.{n}"] for n in NAMES})


Save = Callable[[Statistics], None]


def no_save(_: Statistics) -> None:
    """Save nothing: the callback of a collection without a file."""


def collect_reads(
    model: RunningModel, places: Places, batches: Sequence[Batch], progress: Progress = quiet
) -> dict[str, Array]:
    """Return by key the input moments over the batches: sums over tokens, for an embedding table the counts."""
    from tnlib_adapters.instrument.weight_inputs import read

    sums: dict[str, Array] = {}
    place_of = {place.reads: place for place in places.values()}
    for done, batch in enumerate(batches):
        progress("reading inputs", done, len(batches))
        for key, x in read(model, batch, places).items():
            _add(sums, key, _moments(x, place_of[key]).astype(np.float64))
    progress("reading inputs", len(batches), len(batches))
    return sums


def collect(
    model: RunningModel,
    places: Places,
    batches: Sequence[Batch],
    statistics: Statistics,
    progress: Progress = quiet,
    *,
    save: Save = no_save,
) -> Statistics:
    """Return the statistics with input and gradient moments over the batches, resumed after the last batch.

    `save` is called every few seconds and at the end.
    """
    from tnlib_adapters.instrument.weight_inputs import observe

    place_of = {place.reads: place for place in places.values()}
    for k in _saving("reading activations", statistics.n_read, len(batches), progress, lambda: save(statistics)):
        reads, slopes = observe(model, batches[k], places, _generator(2 * k))
        for key, x in reads.items():
            _add(statistics.reads, key, _moments(x, place_of[key]))
        for key, slope in slopes.items():
            if places[key].predicts:
                slope = slope @ places[key].module.get_parameter("weight")
            _add(statistics.slopes, key, second_moments(slope.numpy()))
        statistics.n_read = k + 1
    return statistics


def measure_gates(
    model: RunningModel,
    places: Places,
    batches: Sequence[Batch],
    components: Mapping[str, Components],
    statistics: Statistics,
    progress: Progress = quiet,
    *,
    save: Save = no_save,
) -> dict[str, Array]:
    """Return for every weight the mean squared derivative with respect to a gate on each of its components.

    The mean is over texts and probes, or over tokens for language models. Half of it is, to lowest order, the loss of
    cosine similarity of the embeddings, or the increase of the divergence of the predictions, when the component is
    removed. Resumes after the last batch of `statistics`, which it updates.
    """
    from tnlib_adapters.instrument.weight_inputs import observe

    tied = model.wiring.tied_key
    sides = {key: _sides(component) for key, component in components.items()}
    for k in _saving("measuring gates", statistics.n_weighed, len(batches), progress, lambda: save(statistics)):
        reads, gradients = observe(model, batches[k], places, _generator(2 * k + 1))
        for key, (left, right) in sides.items():
            x = reads[places[key].reads]
            # a table lookup has row -1 at padding, where slopes are 0
            on_left = left[x] if places[key].is_table else x[..., : len(left)] @ left  # b t [m] c
            slopes = (on_left * (gradients[key] @ right.T)).sum(1)  # b [t] c
            if tied is not None and model.wiring.is_embedding(key):  # the same gate acts on both uses of the table
                slopes += ((reads[tied] @ right.T) * (gradients[tied] @ left)).sum(1)  # b [t] c
            _add(statistics.gates, key, slopes.double().square().sum(0).numpy())
        statistics.n_weighed = k + 1
    count = sum(batch.n_tokens if model.predicts else len(batch.ids) for batch in batches)
    return {key: total / count for key, total in statistics.gates.items()}


def _saving(stage: str, start: int, total: int, progress: Progress, save: Callable[[], None]) -> Iterator[int]:
    """Count from `start` to `total`; save every few seconds and at the end."""
    due = time.monotonic() + _SAVED_EVERY
    for done in range(start, total):
        progress(stage, done, total)
        yield done
        if time.monotonic() > due or done + 1 == total:
            save()
            due = time.monotonic() + _SAVED_EVERY
    progress(stage, total, total)


def _add(sums: dict[str, Array], key: str, batch_sum: Array) -> None:
    if key in sums:
        sums[key] += batch_sum
    else:
        sums[key] = batch_sum


def _moments(x: torch.Tensor, place: Place) -> Array:
    """Return the sum of x x^T over tokens; for token ids, how often each row of the table occurs."""
    if not place.is_table:
        return second_moments(x.numpy())
    ids = x[x >= 0].numpy()
    return np.bincount(ids, minlength=len(place.module.get_parameter("weight"))).astype(np.float32)


def _sides(components: Components) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return torch.from_numpy(components.left).float(), torch.from_numpy(components.right).float()


def _generator(seed: int) -> torch.Generator:
    """Return the generator for the probes of one batch, seeded per batch so that resuming is reproducible."""
    import torch

    return torch.Generator().manual_seed(_SEED + seed)


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


def resume(
    file: Path, checkpoint: Checkpoint, batches: Sequence[Batch], places: Places, longest: int
) -> tuple[Statistics, Save]:
    """Return the statistics of these weights from a file, or new ones if it does not exist, and the save function.

    `longest` is the number of tokens at which texts were truncated.

    Raises
    ------
    FileFormatError
        If the file has another format, or is damaged.
    ArgumentError
        If its statistics belong to another model, text, truncation of the text, or choice of weights.
    """
    origin = _origin(checkpoint, batches, places) | {"tokens": str(longest)}
    return _read(file, origin) if file.exists() else Statistics(), partial(_write, file, origin)


def _read(file: Path, origin: Mapping[str, str]) -> Statistics:
    stored = _header(file)
    for part, description in (
        ("model", "another model"),
        ("tokens", f"calibration_tokens {stored.get('tokens')}, this being {origin['tokens']},"),
        ("text", "another text"),
        ("weights", "another value of what"),
    ):
        if stored.get(part) != origin[part]:
            raise ArgumentError(
                f"compress: statistics must be those of this model on this text, got those of {description} in "
                f"{file}; name another file, or remove it to start anew."
            )
    tensors, _ = read_header(file)
    arrays = {name: info.read_stored() for name, info in tensors.items()}
    if stored.get("digest") != _digest(stored, arrays):
        raise FileFormatError(f"compress: {file} was changed after it was saved; remove it and collect again.")
    reads, slopes, gates = (_below(f"{part}.", arrays) for part in _PARTS)
    return Statistics(reads, slopes, gates, int(stored["read"]), int(stored["weighed"]))


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
    arrays = dict(_arrays(statistics))
    metadata["digest"] = _digest(metadata, arrays)
    entries = [Entry(name, _PARTS[name.partition(".")[0]], values) for name, values in arrays.items()]
    try:
        for _ in write_tensor_file(hidden, entries, metadata):
            pass
        hidden.replace(file)
    finally:
        hidden.unlink(missing_ok=True)


def _arrays(statistics: Statistics) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a file by their names, as they are stored."""
    for part, dtype in _PARTS.items():
        for key, values in getattr(statistics, part).items():
            yield f"{part}.{key}", np.ascontiguousarray(values, STORED_AS[dtype])


def _digest(metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> str:
    """Return a digest of the metadata, but for the digest itself, and of all arrays by name."""
    state = hashlib.sha256(repr(sorted((k, v) for k, v in metadata.items() if k != "digest")).encode())
    for name, values in sorted(arrays.items()):
        state.update(f"{name} {values.dtype.str} {values.shape}".encode() + values.tobytes())
    return state.hexdigest()


def _below(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}


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
