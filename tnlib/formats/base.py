"""What every format shares, and what every format that is a matrix shares on top."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import shorten
from tnlib._typing import Array
from tnlib._validate import as_array, is_list, to_numpy

MOST_LEGS = 64  # of a numpy array


class Dense(ABC):
    """A stand-in for a dense array: knows its shape and can be multiplied out."""

    # numpy must hand `array @ value` to us instead of multiplying out behind the user's back
    __array_ufunc__ = None

    @abstractmethod
    def arrays(self) -> tuple[Array, ...]:
        """Return the stored arrays, in a fixed order."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array."""

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Sizes of the inner legs."""

    @abstractmethod
    def full(self) -> Array:
        """Multiply out to the dense array."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Common dtype of the stored arrays."""
        return np.result_type(*self.arrays())

    @property
    def n_parameters(self) -> int:
        """Count of stored numbers, every factor included."""
        return sum(a.size for a in self.arrays())

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ArgumentError(f"{type(self).__name__}: copy must not be False, a dense array of it is always new.")
        return self.full().astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        name, sizes, ranks = (
            type(self).__name__,
            shorten(self.shape, " x "),
            self.ranks if len(self.ranks) <= 16 else shorten(self.ranks, ", "),
        )
        return f"{name}(shape {sizes}, ranks {ranks}, {self.n_parameters:,} numbers, {self.dtype})"


class Operator(Dense):
    """A matrix held as factors; `scipy.sparse.linalg.aslinearoperator` takes it as it is."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Shape (m, n) of the matrix."""

    @abstractmethod
    def _matmat(self, x: Array) -> Array:
        """Return self @ x for x (n, k), checked, without multiplying out."""

    @abstractmethod
    def _rmatmat(self, x: Array) -> Array:
        """Return self^H @ x for x (m, k), checked, without multiplying out."""

    def matmat(self, x: Array) -> Array:
        """Return self @ x for x of shape (n, k), without multiplying out."""
        return self._matmat(self._operand("matmat", x, self.shape[1]))

    def rmatmat(self, x: Array) -> Array:
        """Return self^H @ x for x of shape (m, k), without multiplying out."""
        return self._rmatmat(self._operand("rmatmat", x, self.shape[0]))

    def matvec(self, x: Array) -> Array:
        """Return self @ x for x of shape (n,)."""
        return self._matmat(self._operand("matvec", x, self.shape[1], columns=1))[:, 0]

    def rmatvec(self, x: Array) -> Array:
        """Return self^H @ x for x of shape (m,)."""
        return self._rmatmat(self._operand("rmatvec", x, self.shape[0], columns=1))[:, 0]

    def _operand(self, method: str, x: Any, rows: int, columns: int | None = None) -> Array:
        """Return `x` as a matrix of that many rows; reshaping something else would give a wrong answer in silence."""
        a, name = self._numbers(method, x), f"{type(self).__name__}.{method}"
        matrix = a[:, None] if a.ndim == columns else a
        if matrix.ndim != 2 or len(matrix) != rows or columns not in (None, matrix.shape[1]):
            expected = f"({rows},)" if columns else f"({rows}, k)"
            raise ArgumentError(f"{name}: x must have shape {expected}, got {a.shape}; legs are flattened row by row.")
        return matrix

    def _numbers(self, method: str, x: Any) -> Array:
        name = f"{type(self).__name__}.{method}"
        a = to_numpy(name, "x", x)
        if a.dtype.kind not in "biufc":
            raise ArgumentTypeError(f"{name}: x must hold numbers, got dtype {a.dtype}; convert it first.")
        return a

    def __matmul__(self, x: Any) -> Any:
        if not self._takes("@", x):
            return NotImplemented
        x = self._numbers("@", x)
        return self.matvec(x) if x.ndim == 1 else self.matmat(x)

    def __rmatmul__(self, x: Any) -> Any:
        if not self._takes("on the right of @", x):
            return NotImplemented
        x = self._numbers("@", x).conj()
        return self.rmatvec(x).conj() if x.ndim == 1 else self.rmatmat(x.T).conj().T

    def _takes(self, sign: str, x: Any) -> bool:
        """Say whether `x` is an array to numpy; another format would be multiplied out behind the user's back."""
        refuse_other_kind(sign, self, x)
        return isinstance(x, list | tuple | np.ndarray) or hasattr(x, "__array__")


def refuse_too_large(value: Dense) -> None:
    """Raise where the dense array of `value` has more legs than numpy allows, or would not fit into memory."""
    name, legs, numbers = type(value).__name__, len(value.shape), math.prod(value.shape)
    if legs > MOST_LEGS:
        raise ArgumentError(
            f"{name}.full: a dense array must have at most {MOST_LEGS} legs, got {legs}; contract some of them first."
        )
    if not fits_in_memory(numbers, value.dtype):
        raise ArgumentError(
            f"{name}.full: the dense array must fit into memory, got 2**{numbers.bit_length() - 1} numbers or more; "
            "slice or contract it first."
        )


def fits_in_memory(numbers: int, dtype: np.dtype[Any]) -> bool:
    """Say whether an array of so many numbers can be had: before a contraction fills memory piece by piece."""
    try:
        np.empty(numbers, dtype)  # reserved, and given back untouched
    except (MemoryError, OverflowError, ValueError):
        return False
    return True


def refuse_other_kind(sign: str, a: Dense, b: Any) -> None:
    """Raise where `b` is a format, but not one that `a` can be combined with."""
    if isinstance(b, Dense):
        raise ArgumentTypeError(
            f"{type(a).__name__} {sign} {type(b).__name__}: both must be of kinds that go together, got others; "
            "make one of the other with tnlib.convert."
        )


def as_stored(format_name: str, parameter: str, a: Any, *, ndim: int) -> Array:
    """Return a read-only view of one stored array, finite and of a native dtype (a copy where that needs one)."""
    view = as_array(format_name, parameter, a, ndim=ndim).view()
    view.flags.writeable = False
    return view


def as_stored_list(format_name: str, parameter: Callable[[int], str], arrays: Any, *, ndim: int) -> tuple[Array, ...]:
    """Return a non-empty tuple of read-only views; `parameter` names the k-th array in messages."""
    if not is_list(arrays) or len(arrays) == 0:
        raise ArgumentTypeError(
            f"{format_name}: expected a non-empty sequence of arrays, got {type(arrays).__name__}; pass a list."
        )
    return tuple(as_stored(format_name, parameter(k), a, ndim=ndim) for k, a in enumerate(arrays))
