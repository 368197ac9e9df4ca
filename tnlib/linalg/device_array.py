"""Arrays in the memory of a device, with the operations that decompositions of large arrays apply to them.

A decomposition reads its array by Gram matrices, by products with a few columns, and by norms. These run on the device,
in double precision; their small results, and all that follows from them, are numpy arrays on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.array_namespace import (
    OtherArray,
    adjoint,
    as_other_array,
    detached,
    dtype_of,
    from_host,
    gram,
    largest,
    namespace,
    norm,
    project,
    shift,
    svd,
    to_host,
)

_BLOCK = 1 << 22  # entries that are converted to double precision at a time


class DeviceArray:
    """An array on a device that numpy cannot read, with the methods that the sweeps use.

    Parameters
    ----------
    x
        An array of a library with a namespace of the array API standard, of one of the four native dtypes.
    """

    def __init__(self, x: OtherArray) -> None:
        self._x = x
        self.shape: tuple[int, ...] = tuple(x.shape)
        self.dtype = dtype_of(x)

    @property
    def ndim(self) -> int:
        """Number of legs."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: int | Sequence[int]) -> DeviceArray:
        """Return the array with these legs, in C order."""
        sizes = shape[0] if isinstance(shape[0], Sequence) else shape
        return DeviceArray(namespace(self._x).reshape(self._x, tuple(sizes)))

    def transpose(self, *axes: int | Sequence[int]) -> DeviceArray:
        """Return the array with its legs in this order."""
        order = axes[0] if isinstance(axes[0], Sequence) else axes
        return DeviceArray(namespace(self._x).permute_dims(self._x, tuple(order)))

    def __getitem__(self, rows: Array) -> Array:
        """Return a few rows, of an array of indices, on the host."""
        return to_host(namespace(self._x).take(self._x, from_host(rows, self._x), axis=0))

    def to_host(self) -> Array:
        """Return all entries."""
        return to_host(self._x)

    def norm(self) -> float:
        """Frobenius norm of an array whose squares are in range."""
        return norm(self._x)

    def largest(self) -> float:
        """Largest absolute real or imaginary part."""
        return largest(self._x)

    def shift(self, e: int) -> DeviceArray:
        """Return the array times 2**e."""
        return DeviceArray(shift(self._x, e))

    def gram(self) -> Array:
        """Return sum_p a[p] a[p]^H (m, m) of (p, m, n), on the host."""
        xp, (_, m, _) = namespace(self._x), self.shape
        parts = [gram(xp.reshape(xp.permute_dims(part, (1, 0, 2)), (m, -1))) for part in self._double_parts()]
        return to_host(sum(parts[1:], parts[0]))  # m [(p n)] m

    def times_adjoint(self, b: Array) -> Array:
        """Return a b^H (m, l) of this (m, n) and `b` (l, n) on the host."""
        right = adjoint(self._double_like(b))
        return self._joined(lambda part: namespace(part).matmul(part, right), 0).to_host()  # m [n] l

    def adjoint_times(self, e: Array) -> DeviceArray:
        """Return e^H a[p] for every p, (p, r, n), of `e` (m, r) on the host and this (p, m, n)."""
        columns = self._double_like(e)
        if self.shape[2] == 1:
            xp, conjugate = namespace(self._x), namespace(columns).matrix_transpose(adjoint(columns))
            flat = DeviceArray(xp.reshape(self._x, self.shape[:2]))
            return flat._joined(lambda part: xp.matmul(part, conjugate), 0).reshape(len(self), -1, 1)  # p [m] r
        axis = 0 if len(self) > self.shape[2] else 2
        return self._joined(lambda part: project(columns, part), axis)  # p r [m] n

    def residual_norm(self, left: Array, right: DeviceArray | Array) -> float:
        """Return norm(a - left @ right) of this (m, n), `left` (m, r) and `right` (r, n)."""
        columns = self._double_like(left)
        rows = right._x if isinstance(right, DeviceArray) else self._double_like(right)
        squares, start = 0.0, 0
        for part in self._double_parts(1):  # columns
            stop = start + part.shape[1]
            squares += norm(part - namespace(part).matmul(columns, rows[:, start:stop])) ** 2  # m [r] n
            start = stop
        return math.sqrt(squares)

    def svd(self) -> tuple[Array, Array, Array]:
        """Return u (m, k), s (k,), vh (k, n) of this (m, n), on the host."""
        u, s, vh = (to_host(a) for a in svd(self._x))
        return u, s, vh

    def _double_like(self, a: Array) -> OtherArray:
        """Return an array of the host on this device, in double precision, complex if one of both is."""
        return from_host(a.astype(np.result_type(a.dtype, self.dtype, np.float64), copy=False), self._x)

    def _double_parts(self, axis: int | None = None) -> Iterator[OtherArray]:
        """Yield slices along `axis`, by default the longest of p and n, in double precision; one if it is already."""
        axis = (0 if len(self) > self.shape[-1] else self.ndim - 1) if axis is None else axis
        xp, wide = namespace(self._x), np.result_type(self.dtype, np.float64)
        if self.dtype == wide:
            yield self._x
            return
        size, before, behind = self.shape[axis], (slice(None),) * axis, (slice(None),) * (self.ndim - axis - 1)
        step = max(1, _BLOCK * size // self.size)
        for k in range(0, size, step):
            part = self._x[(*before, slice(k, min(k + step, size)), *behind)]
            yield xp.astype(part, getattr(xp, wide.name))

    def _joined(self, function: Callable[[OtherArray], OtherArray], axis: int) -> DeviceArray:
        """Return `function` of all slices along `axis`, concatenated."""
        parts = [function(part) for part in self._double_parts(axis)]
        return DeviceArray(parts[0] if len(parts) == 1 else namespace(*parts).concat(parts, axis=axis))


def device_array(function: str, parameter: str, x: OtherArray, *, ndim: int | None = None) -> DeviceArray:
    """Return a validated array of another library on its device."""
    x = as_other_array(function, parameter, x, ndim=ndim)
    return DeviceArray(detached(x))


def contiguous(a: Any) -> Any:
    """Return an array in C order, as one on a device always is for its methods."""
    return a if isinstance(a, DeviceArray) else np.ascontiguousarray(a)


def on_host(a: Any) -> Array:
    """Return a numpy array, that of the host or a copy of one on a device."""
    return a.to_host() if isinstance(a, DeviceArray) else a
