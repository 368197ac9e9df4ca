"""Factors of a compression within a limit of memory: those beyond it are kept in temporary files.

The memory of a compression is that of one part, whatever the number of layers: an attention layer or a matrix with
all its factors. Curves of sizes and errors stay in memory; that of a matrix has at most as many points as ranks.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.executor import SERIAL, Workers
from tnlib_adapters.compression.methods.components import from_upper_triangle, upper_triangle
from tnlib_adapters.factors.factored_matrix import Description, FactoredMatrix
from tnlib_adapters.files.safetensors_file import STORED_AS, Entry, TensorInfo, read_header, write_tensor_file

CACHE_BYTES = 2**28
DTYPE_NAMES = {dtype: name for name, dtype in STORED_AS.items() if name != "BF16"}


class Workspace:
    """Limit of the memory for factors that are not in use, the folder of those beyond it, and who computes them.

    All parts and plans together have at most `max_bytes`. `folder` returns a temporary folder, and is called when the
    limit is reached first; without it, all parts and plans stay in memory. Decompositions run on `workers`.
    """

    def __init__(
        self, max_bytes: float = CACHE_BYTES, folder: Callable[[], Path] | None = None, workers: Workers = SERIAL
    ) -> None:
        self._max_bytes, self._folder, self.workers = max_bytes, folder, workers
        self._n_held = self._n_files = 0

    def admits(self, holder: Any, n_bytes: int) -> bool:
        """Return True and count these bytes, until `holder` is deleted, if they are within the limit.

        What is in memory stays there: parts are used in the same order again and again, where the least recently used
        is always the next one.
        """
        if self._n_held + n_bytes > self._max_bytes:
            return False
        self._n_held += n_bytes
        weakref.finalize(holder, self._free, n_bytes)
        return True

    def _free(self, n_bytes: int) -> None:
        self._n_held -= n_bytes

    def write(self, holder: Any, entries: Sequence[Entry]) -> Mapping[str, TensorInfo] | None:
        """Write tensors into a file that is removed with `holder`, and return them; None if there is no folder."""
        if self._folder is None:
            return None
        file = self._folder() / f"{self._n_files}.safetensors"
        self._n_files += 1
        weakref.finalize(holder, file.unlink, missing_ok=True)
        for _ in write_tensor_file(file, entries, {}):
            pass
        return read_header(file)[0]


class Factorised(Protocol):
    """Factorised attention of a layer, or weight of another module."""

    @property
    def curves(self) -> Sequence[Curve]:
        """Stored numbers and error of each block at each of its options."""

    @property
    def fixed(self) -> int:
        """Numbers stored at every size: biases that are not among the factors."""

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors at one option per block."""


class LazyPart:
    """A factorised layer or weight that `load` makes from its arrays, in memory or in a file of its workspace."""

    def __init__(self, part: Factorised, workspace: Workspace) -> None:
        self.curves: list[Curve] = list(part.curves)
        self.fixed = part.fixed
        self.load = _store(part, workspace)

    def free(self) -> None:
        """Free the memory or the file of the factors, which cannot be loaded again; the curves stay."""
        del self.load


class _ArrayPickler(pickle.Pickler):
    """Pickler that passes all arrays to its callback, also those that are not contiguous, and half of symmetric ones.

    Second moments are symmetric, and most of what a compression stores.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return NotImplemented
        if value.ndim == 2 and np.array_equal(value, value.T):
            return from_upper_triangle, (upper_triangle(value),)
        is_copied = not (value.flags.c_contiguous or value.flags.f_contiguous)
        return np.ascontiguousarray(value).__reduce_ex__(5) if is_copied else NotImplemented


def _store(value: Any, workspace: Workspace) -> Callable[[], Any]:
    """Return a function that makes an equal object from its arrays, in memory or in a file of the workspace.

    Arrays come back with rows or columns first as they were, for BLAS sums their products in the same order; symmetric
    ones come back by rows.
    """
    buffers, emptied = list[pickle.PickleBuffer](), io.BytesIO()
    _ArrayPickler(emptied, 5, buffer_callback=buffers.append).dump(value)
    without_arrays, stored = emptied.getvalue(), StoredArrays(workspace)
    stored.add({str(k): np.asarray(buffer.raw()) for k, buffer in enumerate(buffers)})
    return lambda: pickle.loads(without_arrays, buffers=stored.values())


class StoredArrays(Mapping[str, Array]):
    """Arrays by name, in memory or in files, read again at every access."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._stored: dict[str, Array | TensorInfo] = {}

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Store arrays, in memory if the workspace admits all of them or has no folder."""
        self._stored |= arrays
        if not self._workspace.admits(self, sum(a.nbytes for a in arrays.values())):
            entries = [Entry(name, DTYPE_NAMES[a.dtype], a) for name, a in arrays.items()]
            self._stored |= self._workspace.write(self, entries) or {}

    def __getitem__(self, name: str) -> Array:
        stored = self._stored[name]
        return stored.read_stored() if isinstance(stored, TensorInfo) else stored

    def entries(self) -> dict[str, Array | TensorInfo]:
        """Return the arrays in memory, and where the others are."""
        return dict(self._stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class StoredObjects(Mapping[str, Any]):
    """Objects by name, made of their arrays in memory or in files at every access."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._load: dict[str, Callable[[], Any]] = {}

    def add(self, name: str, value: Any) -> None:
        """Store an object."""
        self._load[name] = _store(value, self._workspace)

    def __getitem__(self, name: str) -> Any:
        return self._load[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._load)

    def __len__(self) -> int:
        return len(self._load)


class StoredMatrices(Mapping[str, Sequence[FactoredMatrix]]):
    """Module path -> factored matrices, in memory or in files, read again at every access."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.descriptions: dict[str, list[Description]] = {}  # of all modules, always in memory
        self._stored = StoredObjects(workspace)

    def add(self, module: str, matrices: Sequence[FactoredMatrix]) -> None:
        """Store the matrices of a module, as copies: factors are often views of those of full rank."""
        self.descriptions[module] = [matrix.describe() for matrix in matrices]
        copies = [
            replace(matrix, arrays={part: np.array(a, order="C") for part, a in matrix.arrays.items()})
            for matrix in (matrix.without_values() for matrix in matrices)
        ]
        self._stored.add(module, copies)

    def order(self, modules: Iterable[str]) -> None:
        """Bring the modules into this order."""
        self.descriptions = {module: self.descriptions[module] for module in modules}

    def __getitem__(self, module: str) -> Sequence[FactoredMatrix]:
        return [matrix.with_integers(matrix.integers) for matrix in self._stored[module]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.descriptions)

    def __len__(self) -> int:
        return len(self.descriptions)
