"""What every format shares, and what every format that is a matrix shares on top."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import NATIVE


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
            raise ValueError(f"{type(self).__name__} holds factors; a dense array of it is always a new one.")
        return self.full().astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        sizes = " x ".join(map(str, self.shape))
        return f"{type(self).__name__}(shape {sizes}, ranks {self.ranks}, {self.n_parameters:,} numbers, {self.dtype})"


class Operator(Dense):
    """A matrix held as factors; `scipy.sparse.linalg.aslinearoperator` takes it as it is."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Shape (m, n) of the matrix."""

    @abstractmethod
    def matmat(self, x: Array) -> Array:
        """Return self @ x for x of shape (n, k), without multiplying out."""

    @abstractmethod
    def rmatmat(self, x: Array) -> Array:
        """Return self^H @ x for x of shape (m, k), without multiplying out."""

    def matvec(self, x: Array) -> Array:
        """Return self @ x for x of shape (n,)."""
        return self.matmat(np.reshape(x, (-1, 1)))[:, 0]

    def rmatvec(self, x: Array) -> Array:
        """Return self^H @ x for x of shape (m,)."""
        return self.rmatmat(np.reshape(x, (-1, 1)))[:, 0]

    def __matmul__(self, x: Array) -> Array:
        return self.matvec(x) if np.ndim(x) == 1 else self.matmat(x)

    def __rmatmul__(self, x: Array) -> Array:
        return self.rmatvec(np.conj(x)).conj() if np.ndim(x) == 1 else self.rmatmat(np.conj(x).T).conj().T


def as_stored(format_name: str, parameter: str, a: Any, *, ndim: int) -> Array:
    """Return a read-only view of one stored array, refusing what no format can hold."""
    array = np.asarray(a)
    if array.dtype.name not in NATIVE:
        if array.dtype.kind not in "iub":
            raise ArgumentTypeError(
                f"{format_name}: {parameter} must be float32, float64, complex64 or complex128, "
                f"got dtype {array.dtype}; convert it first."
            )
        array = array.astype(np.float64)
    if array.ndim != ndim or array.size == 0:
        raise ArgumentError(
            f"{format_name}: {parameter} must have {ndim} legs, none of size 0, got shape {array.shape}; "
            "reshape it first."
        )
    view = array.view()
    view.flags.writeable = False
    return view


def as_stored_list(format_name: str, parameter: Callable[[int], str], arrays: Any, *, ndim: int) -> tuple[Array, ...]:
    """Return a non-empty tuple of read-only views; `parameter` names the k-th array in messages."""
    if not isinstance(arrays, Sequence | np.ndarray) or isinstance(arrays, str) or len(arrays) == 0:
        raise ArgumentTypeError(
            f"{format_name}: expected a non-empty sequence of arrays, got {type(arrays).__name__}; pass a list."
        )
    return tuple(as_stored(format_name, parameter(k), a, ndim=ndim) for k, a in enumerate(arrays))
