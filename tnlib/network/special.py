"""Tensors that networks are glued with: deltas, identities on groups of legs, swaps; and how isometric a tensor is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_legs, as_sizes
from tnlib.formats.base import MOST_LEGS, fits_in_memory
from tnlib.linalg.scale import norm

_ISOMETRIC = 1e4  # an isometry that was computed is off by a few eps per column


def delta(size: int, legs: int, *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the copy tensor: 1 where all indices are equal, 0 elsewhere.

    With two legs the identity, with three the tensor that makes a vector a diagonal matrix.

    Parameters
    ----------
    size
        Of every leg.
    legs
        How many there are.
    dtype
        Of the array.

    Returns
    -------
    ndarray
        (size, ..., size).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `size` or `legs` is no positive integer, or no memory holds so many numbers.

    Examples
    --------
    >>> import numpy as np
    >>> np.tensordot(delta(2, 3), [5.0, 7.0], 1)
    array([[5., 0.],
           [0., 7.]])
    """
    size, legs = as_count("delta", "size", size), as_count("delta", "legs", legs)
    _check_array("delta", (size,) * legs, dtype)
    out = np.zeros((size,) * legs, dtype)
    out.reshape(-1)[:: max(1, sum(size**k for k in range(legs)))] = 1
    return out


def _check_array(function: str, shape: Sequence[int], dtype: Any) -> None:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "biufc":
        raise ArgumentTypeError(
            f"{function}: dtype must be one of numbers, got {dtype!r}; pass for example numpy.float64."
        )
    if len(shape) > MOST_LEGS or not fits_in_memory(math.prod(shape), kind):
        raise ArgumentError(
            f"{function}: the array must have at most {MOST_LEGS} legs and fit into memory, got {len(shape)} legs and "
            f"2**{sum(map(math.log2, shape)):.0f} numbers or so; use smaller ones, for example as a train."
        )


def identity(sizes: Sequence[int], *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the identity on a group of legs: the outer product of one identity per leg, rows before columns.

    Parameters
    ----------
    sizes
        Of the legs.
    dtype
        Of the array.

    Returns
    -------
    ndarray
        (sizes ..., sizes ...). Flattened to a matrix it is the identity on the product of the sizes: kron(1, 1) = 1.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `sizes` are no positive integers.

    Examples
    --------
    >>> import numpy as np
    >>> bool((identity((5, 3)).reshape(15, 15) == np.eye(15)).all())
    True
    """
    sizes = as_sizes("identity", "sizes", sizes)
    _check_array("identity", (*sizes, *sizes), dtype)
    return np.eye(math.prod(sizes), dtype=dtype).reshape(*sizes, *sizes)


def flattening(sizes: Sequence[int], *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the tensor that joins legs into one, in C order: the first of them is the slowest.

    Parameters
    ----------
    sizes
        Of the legs to be joined.
    dtype
        Of the array.

    Returns
    -------
    ndarray
        (sizes ..., product of the sizes), unitary between the two sides: contracted over its last leg with another one
        it is `identity(sizes)`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `sizes` are no positive integers.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(6.0).reshape(2, 3)
    >>> np.tensordot(x, flattening((2, 3)), 2)
    array([0., 1., 2., 3., 4., 5.])
    """
    sizes = as_sizes("flattening", "sizes", sizes)
    _check_array("flattening", (*sizes, math.prod(sizes)), dtype)
    return np.eye(math.prod(sizes), dtype=dtype).reshape(*sizes, -1)


def swap(n: int, m: int, *, dtype: npt.DTypeLike = np.float64) -> Array:
    """Return the operator that exchanges two legs: x (n, m) goes to x.T (m, n).

    Parameters
    ----------
    n, m
        Sizes of the first and the second leg.
    dtype
        Of the array.

    Returns
    -------
    ndarray
        (m, n, n, m), rows before columns.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a size is no positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(6.0).reshape(2, 3)
    >>> bool((np.tensordot(swap(2, 3), x, 2) == x.T).all())
    True
    """
    n, m = as_count("swap", "n", n), as_count("swap", "m", m)
    _check_array("swap", (n, m, n, m), dtype)
    return np.ascontiguousarray(identity((n, m), dtype=dtype).transpose(1, 0, 2, 3))


def isometry_error(a: Any, legs: Any) -> float:
    """Return norm(Q^H Q - 1), Q being `a` as a matrix from the group `legs` onto its other legs.

    Parameters
    ----------
    a
        An array, or a tensor of quimb.
    legs
        The legs at the tip of the triangle, not all of them: numbers, or names of a tensor of quimb.

    Returns
    -------
    float
        The Frobenius norm; at least 1 where the other legs have no room for an isometry.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `legs` are no legs of `a`, or all of them.

    Examples
    --------
    >>> import numpy as np
    >>> isometry_error(np.eye(3)[:, :2], 1), isometry_error(np.eye(3)[:, :2], 0)
    (0.0, 1.0)
    """
    return _error(_towards("isometry_error", a, legs))


def is_isometry(a: Any, legs: Any) -> bool:
    """Say whether `a` is isometric from the group `legs` into its other legs, as far as rounding lets one tell.

    That is, whether `isometry_error` is below ten thousand eps times the root of the number of columns.

    Parameters
    ----------
    a
        An array, or a tensor of quimb.
    legs
        Numbers, or names of a tensor of quimb.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `legs` are no legs of `a`, or all of them.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> u, s, vh = tnlib.svd(np.arange(24.0).reshape(2, 3, 4), left=(0, 1)).value
    >>> is_isometry(u, 2), is_isometry(vh, 0), is_isometry(2 * u, 2)
    (True, True, False)
    """
    matrix = _towards("is_isometry", a, legs)
    limit = _ISOMETRIC * float(np.finfo(matrix.dtype).eps) * math.sqrt(matrix.shape[1])
    return _error(matrix) <= limit


def _error(matrix: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no isometry
        error = norm(matrix.conj().T @ matrix - np.eye(matrix.shape[1]))
    return math.inf if math.isnan(error) else error


def _towards(function: str, a: Any, legs: Any) -> Array:
    """Return `a` as a matrix (other legs, legs)."""
    data = as_array(function, "a", getattr(a, "data", a) if hasattr(a, "inds") else a)
    if hasattr(a, "inds"):
        legs = (legs,) if isinstance(legs, str) else legs
        if not isinstance(legs, Sequence) or not all(isinstance(i, str) for i in legs):
            raise ArgumentTypeError(
                f"{function}: legs must be names of indices, got {legs!r}; pass some of {', '.join(a.inds)}."
            )
        if missing := [i for i in legs if i not in a.inds]:
            raise ArgumentError(
                f"{function}: legs must name indices of the tensor, got {missing[0]}; there are {', '.join(a.inds)}."
            )
        legs = [a.inds.index(i) for i in legs]
    tip = as_legs(function, "legs", legs, data.ndim)
    columns = math.prod(data.shape[k] for k in tip)
    return np.moveaxis(data, tip, range(-len(tip), 0)).reshape(-1, columns)
