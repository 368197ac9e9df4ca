"""A caller's function of indices: validated values, a call budget, and no index evaluated twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_numbers, to_numpy

_BATCH = 1 << 16  # points in one call


class CallBudgetExceeded(Exception):
    """More evaluations are needed than the budget allows."""


class CachedFunction:
    """Entries of f at indices (m, d), each evaluated once; of `max_calls` evaluations, `reserved` are for `release`."""

    def __init__(
        self, function: str, f: Callable[[Array], Any], shape: Sequence[int], max_calls: int, reserved: int
    ) -> None:
        self._function, self._f, self._shape = function, f, tuple(shape)
        self.remaining, self._reserved = max_calls - reserved, reserved
        self._key_dtype = np.min_scalar_type(max(shape) - 1)  # short keys
        self._positions: dict[bytes, int] = {}
        self._values, self._n_values = np.empty(1024), 0
        self.dtype: np.dtype[Any] = np.dtype(np.float32)  # of the values of f, after the first call
        self.largest = 0.0  # modulus so far

    @property
    def n_calls(self) -> int:
        """Number of points evaluated."""
        return self._n_values

    def evaluated(self) -> tuple[Array, Array]:
        """Return the points (m, d) evaluated so far, and the entries (m,) there."""
        keys = np.frombuffer(b"".join(self._positions), self._key_dtype)
        return keys.reshape(-1, len(self._shape)).astype(np.int64), self._values[: len(self._positions)]

    def evaluate_all(self) -> Array:
        """Evaluate the entries that are missing, and return all (n[0], ..., n[d-1]) in the precision of f."""
        self.release()
        known, missing = self.evaluated()[0], self.missing()
        self._evaluate({}, missing)
        entries = np.empty(self._shape, self.dtype)
        entries[tuple(np.concatenate([known, missing]).T)] = self._values[: self._n_values]
        return entries

    def missing(self) -> Array:
        """Return the points (m, d) that were not evaluated."""
        known = np.ravel_multi_index(tuple(self.evaluated()[0].T), self._shape)
        return np.stack(np.unravel_index(np.setdiff1d(np.arange(math.prod(self._shape)), known), self._shape), axis=1)

    def release(self) -> None:
        """Make the reserved evaluations available."""
        self.remaining, self._reserved = self.remaining + self._reserved, 0

    def __call__(self, indices: Array) -> Array:
        """Return the entries (m,) in double precision."""
        width = indices.shape[1] * self._key_dtype.itemsize
        raw = indices.astype(self._key_dtype).tobytes()
        keys = [raw[k : k + width] for k in range(0, len(raw), width)]
        new = {key: row for row, key in enumerate(keys) if key not in self._positions}
        if len(new) > self.remaining:
            raise CallBudgetExceeded
        if new:
            self._evaluate(new, indices[list(new.values())])
        return self._values[[self._positions[key] for key in keys]]

    def _evaluate(self, keys: dict[bytes, int], indices: Array) -> None:
        for start in range(0, len(indices), _BATCH):
            batch = np.array(indices[start : start + _BATCH], np.int64)
            self.remaining -= len(batch)
            try:
                values = self._f(batch.copy())  # f may change its copy
            except (TypeError, ValueError, IndexError) as error:
                if not self._n_values:
                    error.add_note(
                        f"{self._function}: f is called with integer indices (n_points, d), here {batch.shape}, and "
                        "must return (n_points,) numbers; of a function g of one point pass "
                        "lambda points: numpy.array([g(point) for point in points])."
                    )
                raise
            values = self._validated(values, batch)
            self._store(values)
            self.largest = max(self.largest, float(np.abs(values).max()))
        self._positions |= {key: position for position, key in enumerate(keys, len(self._positions))}

    def _store(self, values: Array) -> None:
        stop = self._n_values + len(values)
        dtype = np.result_type(self._values, values)
        if stop > len(self._values) or dtype != self._values.dtype:
            larger = np.empty(max(len(self._values), 2 * stop), dtype)
            larger[: self._n_values] = self._values[: self._n_values]
            self._values = larger
        self._values[self._n_values : stop] = values
        self._n_values = stop

    def _validated(self, values: Any, indices: Array) -> Array:
        """Return the values that f returned for `indices`, finite and of a native dtype."""
        name = self._function
        a = to_numpy(name, "the return value of f", values)
        if a.shape != (len(indices),):
            raise ArgumentError(
                f"{name}: f must return one value for each of its (n_points, d) indices, got shape {a.shape} "
                f"for {len(indices)} points; return an array (n_points,)."
            )
        a = as_numbers(name, "the return value of f", a)
        if not np.isfinite(a).all():
            bad = int(np.argmin(np.isfinite(a)))
            index = tuple(indices[bad].tolist())
            raise ArgumentError(
                f"{name}: f must be finite, got {a[bad]} at index {index}; return a number there, for example 0."
            )
        self.dtype = np.result_type(self.dtype, a.dtype)
        return a
