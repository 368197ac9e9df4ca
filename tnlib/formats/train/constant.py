"""Constant trains and the identity, all of rank one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tnlib._validate import as_dtype, as_sizes
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix


def ones(shape: Sequence[int], dtype: npt.DTypeLike = np.float64) -> TensorTrain:
    """Return the train with 1 in every entry.

    Parameters
    ----------
    shape
        (n[0], ..., n[d-1]).
    dtype
        float32, float64, complex64 or complex128.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `shape` is no sequence of positive integers, or `dtype` none of these.

    Examples
    --------
    >>> import tnlib
    >>> f"{tnlib.ones((2,) * 100).norm() / 2**50:.6f}"
    '1.000000'
    """
    sizes, target = as_sizes("ones", "shape", shape), as_dtype("ones", dtype)
    return TensorTrain([np.ones((1, n, 1), target) for n in sizes])


def zeros(shape: Sequence[int], dtype: npt.DTypeLike = np.float64) -> TensorTrain:
    """Return the train with 0 in every entry; arguments as for `ones`.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.zeros((2, 3)).norm()
    0.0
    """
    sizes, target = as_sizes("zeros", "shape", shape), as_dtype("zeros", dtype)
    return TensorTrain([np.zeros((1, n, 1), target) for n in sizes])


def eye(shape: Sequence[int], dtype: npt.DTypeLike = np.float64) -> TTMatrix:
    """Return the identity as a TT-matrix with row and column legs of sizes `shape`; arguments as for `ones`.

    Examples
    --------
    >>> import tnlib
    >>> float(tnlib.eye((2, 3)).full().sum())
    6.0
    """
    sizes, target = as_sizes("eye", "shape", shape), as_dtype("eye", dtype)
    return TTMatrix([np.eye(n, dtype=target).reshape(1, n, n, 1) for n in sizes])
