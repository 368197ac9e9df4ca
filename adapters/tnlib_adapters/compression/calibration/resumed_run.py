"""Folder of a run: its statistics, which later runs use again, and the fitted blocks of an interrupted one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.compression.calibration.statistics import Statistics
from tnlib_adapters.compression.methods.components import from_upper_triangle, upper_triangle
from tnlib_adapters.compression.methods.out_of_core import DTYPE_NAMES, StoredArrays
from tnlib_adapters.factors.factored_matrix import Description, FactoredMatrix, by_module
from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.files.json_file import JsonFile
from tnlib_adapters.files.safetensors_file import (
    STORED_AS,
    ComputedTensor,
    Entry,
    TensorInfo,
    is_as_written,
    read_header,
    write_digested,
)

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import WeightUses

_VERSION, _FITTED_VERSION = "10", "3"  # of the statistics, and of fitted blocks
_FIT, _MATRICES = "fit", "matrices"
_ORIGIN = "tnlib_calibration.json"
_UPPER = ", upper triangle"  # of the name of a symmetric matrix, whose rows are stored from the diagonal on
# dtype of the activations, and of accumulated sums
_PARTS = {"reads": "F32", "slopes": "F32", "scales": "F64", "losses": "F64"}
# streams and fitted blocks, also of a run that was killed
_OF_RUN = re.compile(r"(stream|gradient|truncated)-\d+(\.partial)?|fitted\d+\.safetensors|\..*\.partial")


class CalibrationFolder:
    """Folder of what a run stores between blocks: statistics, fitted blocks, and the files of `Streams`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, origin: Mapping[str, str]) -> None:
        """Make the folder, if it does not exist, for statistics of this origin, see `origin_of`.

        `ArgumentError` if it holds other files, or results of another model, text, method, choice of weights or
        version.
        """
        check_run_folder(self.path)
        self.path.mkdir(exist_ok=True)
        file = self.path / _ORIGIN
        if not file.exists():
            hidden = file.with_name(f".{file.name}.partial")
            hidden.write_text(json.dumps(dict(origin)), encoding="utf-8")
            hidden.replace(file)
            return
        stored = JsonFile("compress", file, "remove the folder to start anew").read()
        other = next((name for name, expected in origin.items() if stored.get(name) != expected), None)
        if other is not None:
            raise ArgumentError(
                f"compress: folder (--folder) must belong to this model, text, method and choice of weights, got "
                f"another {other} in {self.path}; name another folder, or remove it to start anew."
            )

    def groups(self) -> list[int]:
        """Return the groups of weights whose statistics are saved; raise if a file is damaged."""
        groups = [int(file.stem.removeprefix("group")) for file in self.path.glob("group*.safetensors")]
        for group in groups:
            _check_written(self._of_group(group))
        return groups

    def save(self, group: int, statistics: Statistics) -> None:
        """Save the statistics of a group."""
        entries = [
            _entry(f"{part}.{key}", dtype, values)
            for part, dtype in _PARTS.items()
            for key, values in _values_of(getattr(statistics, part)).items()
        ]
        write_digested(self._of_group(group), {}, entries)

    def statistics(self, group: int, keys: Collection[str]) -> Statistics:
        """Return the saved statistics of a group for these keys."""
        tensors = read_header(self._of_group(group))[0]
        stored = {info.name.removesuffix(_UPPER): info for info in tensors.values()}

        def saved(part: str) -> dict[str, Array]:
            return {key: _read(stored[f"{part}.{key}"]) for key in keys if f"{part}.{key}" in stored}

        return Statistics(saved("reads"), saved("slopes"), saved("scales"), saved("losses"))

    def finish(self) -> None:
        """Remove the files of the run but for its statistics, when it is done."""
        for file in self.path.iterdir() if self.path.is_dir() else ():
            if _OF_RUN.fullmatch(file.name) and file.is_file():
                file.unlink()

    def _of_group(self, group: int) -> Path:
        return self.path / f"group{group}.safetensors"


def origin_of(
    model: RunningModel, uses: WeightUses, sample: Sequence[Batch], fit: Sequence[Batch], method: str
) -> dict[str, str]:
    """Return what identifies statistics: the method, and digests of the weight files, of the tokens and of the keys.

    `sample` and `fit` are the batches of the statistics and of the fit.
    """
    weights, tokens = hashlib.sha256(), hashlib.sha256()
    for file in sorted({info.file for info in model.weights.source.checkpoint.folder.tensors.values()}):
        with file.open("rb") as opened:
            hashlib.file_digest(opened, lambda: weights)
    for batch in (*sample, *fit):
        for part in (batch.ids, batch.mask):
            tokens.update(repr(tuple(part.shape)).encode() + part.cpu().numpy().astype("<i8").tobytes())
    return {
        "version": _VERSION,
        "model": weights.hexdigest(),
        "window": str(model.longest),
        "text": tokens.hexdigest(),
        "what": hashlib.sha256("\n".join(sorted(uses)).encode()).hexdigest(),
        "dtype": f"{model.dtype}",
        "method": method,
    }


def check_run_folder(folder: Path, out: Path | None = None) -> None:
    """Raise if a folder holds anything but the results of a run, lies in OUT, or OUT in it."""
    inner, outer = folder.resolve(), folder.resolve() if out is None else out.resolve()
    if out is not None and (inner.is_relative_to(outer) or outer.is_relative_to(inner)):
        raise ArgumentError(
            f"compress: folder (--folder) must lie outside OUT, and OUT outside it, got {folder} and {out}; name "
            "another folder."
        )
    if not folder.absolute().parent.is_dir():
        raise ArgumentError(
            f"compress: folder (--folder) must lie in a folder that exists, got {folder}; name another."
        )
    if folder.exists() and not (folder.is_dir() and ((folder / _ORIGIN).exists() or not any(folder.iterdir()))):
        raise ArgumentError(
            f"compress: folder (--folder) must be a new folder, an empty one or that of another run, got {folder}; "
            "name another one."
        )


class FittedFiles:
    """One file for every block that is fitted, in the folder of the streams of a run.

    Files of a fit of other options or another number of steps are removed.
    """

    def __init__(self, streams: Streams, options: Mapping[str, Sequence[int]], n_steps: int) -> None:
        chosen = json.dumps(
            [_FITTED_VERSION, {name: list(map(int, choice)) for name, choice in options.items()}, n_steps]
        )
        self._streams, self._folder = streams, streams.folder
        self._fit = hashlib.sha256(chosen.encode()).hexdigest()

    def resume(self) -> int:
        """Return the number of blocks that are saved; files of another fit are removed."""
        n = 0
        while self._file(n).exists() and read_header(self._file(n))[1].get(_FIT) == self._fit:
            n += 1
        # the fit of the next block reads the streams after those that are done
        if not n or not self._streams.has(f"truncated-{n}"):
            for old in (*self._folder.glob("fitted*.safetensors"), *self._folder.glob("truncated-*")):
                old.unlink()
            return 0
        return n

    def save(self, k: int, matrices: Sequence[FactoredMatrix]) -> None:
        """Save the weights of a block."""
        described = [matrix.describe() for matrix in matrices]
        entries = [
            Entry(f"{at}.{part}", description.tensors[part][0] or DTYPE_NAMES[values.dtype], values)
            for at, (matrix, description) in enumerate(zip(matrices, described, strict=True))
            for part, values in matrix.parts().items()
        ]
        metadata = {_FIT: self._fit, _MATRICES: json.dumps([asdict(description) for description in described])}
        write_digested(self._file(k), metadata, entries)

    def read(self, k: int) -> dict[str, list[FactoredMatrix]]:
        """Return the weights of a block by module."""
        file = self._file(k)
        _check_written(file)
        tensors, metadata = read_header(file)
        matrices = (
            _description(entry).read(lambda part, at=at: tensors[f"{at}.{part}"].read())  # type: ignore[misc]
            for at, entry in enumerate(json.loads(metadata[_MATRICES]))
        )
        return by_module(matrices)

    def _file(self, k: int) -> Path:
        return self._folder / f"fitted{k}.safetensors"


def _description(entry: Mapping[str, Any]) -> Description:
    """Return a description from its fields in JSON."""
    shapes = {part: tuple(shape) for part, shape in entry["shapes"].items()}
    formats = {
        part: IntegerFormat(**{**form, "axis": tuple(axis) if isinstance(axis := form["axis"], list) else axis})
        for part, form in entry["formats"].items()
    }
    fields = {"shapes": shapes, "ranks": tuple(entry["ranks"]), "rows": tuple(entry["rows"]), "formats": formats}
    return Description(**{**entry, **fields})


def _check_written(file: Path) -> None:
    if not is_as_written(file):
        raise FileFormatError(f"compress: {file} was changed after it was saved; remove its folder to start anew.")


def _values_of(arrays: Mapping[str, Array]) -> Mapping[str, Array | TensorInfo]:
    return arrays.entries() if isinstance(arrays, StoredArrays) else arrays


@dataclass(frozen=True)
class _UpperTriangle(ComputedTensor):
    """Rows of a symmetric matrix from the diagonal on."""

    matrix: Entry

    def read_stored(self) -> Array:
        """Return the entries."""
        return upper_triangle(self.matrix.read()).astype(STORED_AS[self.dtype], copy=False)


def _entry(name: str, dtype: str, values: Array | TensorInfo) -> Entry:
    """Return values to be saved; moments, which are symmetric, as their upper triangle."""
    entry = Entry(name, dtype, values)
    if len(values.shape) == 2:
        n, name = values.shape[0], f"{name}{_UPPER}"
        return Entry(name, dtype, _UpperTriangle(Path(), name, dtype, (n * (n + 1) // 2,), 0, 0, entry))
    return entry._replace(values=np.ascontiguousarray(entry.read(), STORED_AS[dtype]))


def _read(info: TensorInfo) -> Array:
    """Return values that `_entry` saved."""
    values = info.read_stored()
    return from_upper_triangle(values) if info.name.endswith(_UPPER) else values
