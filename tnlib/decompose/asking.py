"""A user's function of indices: its values checked, counted against a budget, and never asked for twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_numbers, to_numpy

_TOGETHER = 1 << 16  # points in one call


class BudgetSpent(Exception):
    """More values were needed than the budget has left."""


class Values:
    """Entries of f at indices (m, d), each asked for once.

    Parameters
    ----------
    function
        Name for messages.
    f
        Takes an integer array (m, d), which it may change, and returns (m,) numbers.
    shape
        (n[0], ..., n[d-1]).
    max_calls
        How many points may be asked for.
    keep_back
        Of these, how many only after `release`.
    """

    def __init__(
        self, function: str, f: Callable[[Array], Any], shape: Sequence[int], max_calls: int, keep_back: int
    ) -> None:
        self._function, self._f = function, f
        self.left, self._kept_back = max_calls - keep_back, keep_back  # of the budget
        self._packed = np.min_scalar_type(max(shape) - 1)  # indices as keys: short ones
        self._places: dict[bytes, int] = {}
        self._held, self._n_stored = np.empty(1024), 0
        self.dtype: np.dtype[Any] = np.dtype(np.float32)  # of what f returns, once it was called
        self.largest = 0.0  # modulus seen so far

    @property
    def n_calls(self) -> int:
        """Points that f was asked for."""
        return len(self._places)

    def release(self) -> None:
        """Let what was kept back be spent."""
        self.left, self._kept_back = self.left + self._kept_back, 0

    def __call__(self, indices: Array) -> Array:
        """Return the entries (m,) in double precision."""
        width = indices.shape[1] * self._packed.itemsize
        raw = indices.astype(self._packed).tobytes()
        keys = [raw[k : k + width] for k in range(0, len(raw), width)]
        new = {key: row for row, key in enumerate(keys) if key not in self._places}
        if len(new) > self.left:
            raise BudgetSpent
        if new:
            self._learn(new, indices[list(new.values())])
        return self._held[[self._places[key] for key in keys]]

    def _learn(self, keys: dict[bytes, int], indices: Array) -> None:
        for start in range(0, len(indices), _TOGETHER):
            some = np.array(indices[start : start + _TOGETHER], np.int64)  # a copy, so that f may do what it likes
            self.left -= len(some)
            values = self._checked(self._f(some.copy()), some)
            self._store(values)
            self.largest = max(self.largest, float(np.abs(values).max()))
        for place, key in enumerate(keys, len(self._places)):
            self._places[key] = place

    def _store(self, values: Array) -> None:
        stop = self._n_stored + len(values)
        wider = np.result_type(self._held, values)
        if stop > len(self._held) or wider != self._held.dtype:
            held = np.empty(max(len(self._held), 2 * stop), wider)
            held[: self._n_stored] = self._held[: self._n_stored]
            self._held = held
        self._held[self._n_stored : stop] = values
        self._n_stored = stop

    def _checked(self, values: Any, indices: Array) -> Array:
        """Return what f returned for `indices`, or say what is wrong with it."""
        name = self._function
        a = to_numpy(name, "what f returns", values)
        if a.shape != (len(indices),):
            raise ArgumentError(
                f"{name}: f must return one value for each of its (n_points, d) indices, got shape {a.shape} "
                f"for {len(indices)} points; return an array (n_points,)."
            )
        a = as_numbers(name, "what f returns", a)
        if not np.isfinite(a).all():
            bad = int(np.argmax(~np.isfinite(a)))
            where = tuple(int(i) for i in indices[bad])
            raise ArgumentError(
                f"{name}: f must be finite, got {a[bad]} at index {where}; return a number there, for example 0."
            )
        self.dtype = np.result_type(self.dtype, a.dtype)
        return a


def as_function(function: str, f: Any) -> Callable[[Array], Any]:
    """Return `f` if it can be called."""
    if not callable(f):
        raise ArgumentTypeError(
            f"{function}: f must be a function of an integer array (n_points, d), got a {type(f).__name__}; "
            "to decompose an array use tnlib.tt_svd."
        )
    checked: Callable[[Array], Any] = f
    return checked
