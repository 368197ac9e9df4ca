"""Deprecated factories of constant tensors; numpy and quimb have them in one line."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._format import MAX_NDIM, fits_in_memory
from tnlib._typing import Array
from tnlib._validate import as_count, as_sizes


def delta(size: int, legs: int, *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the copy tensor (size, ..., size); deprecated, use `quimb.tensor.COPY_tensor(size, inds).data`."""
    shape = (as_count("delta", "size", size),) * as_count("delta", "legs", legs)
    _check("delta", shape, dtype, "quimb.tensor.COPY_tensor(size, inds).data")
    out = np.zeros(shape, dtype)
    out[(np.arange(shape[0]),) * len(shape)] = 1
    return out


def identity(sizes: Sequence[int], *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the identity on a group of legs (sizes ..., sizes ...); deprecated, use numpy.eye and reshape."""
    sizes = as_sizes("identity", "sizes", sizes)
    _check("identity", (*sizes, *sizes), dtype, "numpy.eye(math.prod(sizes)).reshape(*sizes, *sizes)")
    return np.eye(math.prod(sizes), dtype=dtype).reshape(*sizes, *sizes)


def flattening(sizes: Sequence[int], *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the tensor (sizes ..., n) that fuses legs in C order; deprecated, use numpy.eye and reshape."""
    sizes = as_sizes("flattening", "sizes", sizes)
    _check("flattening", (*sizes, math.prod(sizes)), dtype, "numpy.eye(math.prod(sizes)).reshape(*sizes, -1)")
    return np.eye(math.prod(sizes), dtype=dtype).reshape(*sizes, -1)


def swap(n: int, m: int, *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the operator (m, n, n, m) that exchanges two legs; deprecated, use numpy.eye, reshape and transpose."""
    n, m = as_count("swap", "n", n), as_count("swap", "m", m)
    _check("swap", (m, n, n, m), dtype, "numpy.eye(n * m).reshape(n, m, n, m).transpose(1, 0, 2, 3)")
    return np.ascontiguousarray(np.eye(n * m, dtype=dtype).reshape(n, m, n, m).transpose(1, 0, 2, 3))


def _check(function: str, shape: Sequence[int], dtype: Any, replacement: str) -> None:
    """Refuse a dtype that is not numeric or an array that does not fit into memory; then warn of the deprecation."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "biufc":
        raise ArgumentTypeError(
            f"{function}: dtype must be one of numbers, got {dtype!r}; pass for example numpy.float64."
        )
    if len(shape) > MAX_NDIM or not fits_in_memory(math.prod(shape), kind):
        raise ArgumentError(
            f"{function}: the array must have at most {MAX_NDIM} legs and fit into memory, got {len(shape)} legs and "
            f"2**{sum(map(math.log2, shape)):.0f} numbers or so; use smaller ones, for example as a train."
        )
    warnings.warn(
        f"tnlib.interop.quimb.{function} is deprecated; use {replacement} instead.", DeprecationWarning, stacklevel=3
    )
