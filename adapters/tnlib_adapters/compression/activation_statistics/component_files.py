"""Components of weights in the folder of a run in progress: a run that is resumed decomposes no weight again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.out_of_core import by_columns
from tnlib_adapters.files.tensor_file import Entry, TensorInfo, is_as_written, read_header, write_digested

_PARTS, _TRANSPOSED = ("left", "right", "losses"), ".T"
_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float64): "F64"}


class ComponentFile:
    """Components of the weights of one group in a file.

    Parameters
    ----------
    file
        One that exists is read; a damaged one is made again. None saves nothing.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._stored: Mapping[str, TensorInfo] = {}
        if file is not None and file.exists() and is_as_written(file):
            self._stored = read_header(file)[0]

    def get(
        self, keys: Collection[str], compute: Callable[[], Iterable[tuple[str, Components]]]
    ) -> Mapping[str, Components]:
        """Return the components of these weights, by their keys: those that are saved, or computed and saved."""
        if all(f"{key}.losses" in self._stored for key in keys):
            return {key: Components(*(self._read(f"{key}.{part}") for part in _PARTS)) for key in keys}
        computed = dict(compute())
        if self._file is not None and computed:
            arrays = {f"{key}.{part}": getattr(own, part) for key, own in computed.items() for part in _PARTS}
            entries = [
                Entry(name + _TRANSPOSED, _NAMES[a.dtype], a.T) if by_columns(a) else Entry(name, _NAMES[a.dtype], a)
                for name, a in arrays.items()
            ]
            write_digested(self._file, {}, entries)
        return computed

    def _read(self, name: str) -> Array:
        if name in self._stored:
            return self._stored[name].read_stored()
        return self._stored[name + _TRANSPOSED].read_stored().T
