"""Trains of rank one: product states, constant trains, the identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tnlib._stored_arrays import refuse_unallocatable
from tnlib._typing import Array
from tnlib._validate import as_array, as_dtype, as_list, as_sizes
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix


def product_state(vectors: Sequence[npt.ArrayLike] | Array) -> TensorTrain:
    """Return the outer product of vectors as a TensorTrain of ranks 1.

    Parameters
    ----------
    vectors
        Vectors (n[0],), ..., (n[d-1],), real or complex, or the rows of a matrix (d, n): `np.eye(2)[[0, 1, 0, 1]]` for
        a basis state of four qubits. They are not normalized.

    Returns
    -------
    TensorTrain
        Of shape (n[0], ..., n[d-1]), in the common dtype of the vectors. Core k is vector k, without a centre.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If there is no vector, or one is empty, not finite, or not 1-dimensional.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> plus = tnlib.product_state([np.array([1.0, 1.0]) / np.sqrt(2)] * 100)
    >>> f"{plus.norm():.6f}", f"{tnlib.product_state(np.eye(2)[[0, 1, 0]])[0, 1, 0]:.1f}"
    ('1.000000', '1.0')
    """
    rows = as_list("product_state", "vectors", vectors, "vectors")
    checked = [as_array("product_state", f"vectors[{k}]", row, ndim=1) for k, row in enumerate(rows)]
    return TensorTrain([vector[None, :, None].copy() for vector in checked])  # independent of the arguments


def ones(shape: Sequence[int], dtype: npt.DTypeLike = np.float64) -> TensorTrain:
    """Return the train of `shape` (n[0], ..., n[d-1]) with 1 in every entry.

    `dtype` is float32, float64, complex64 or complex128.

    Examples
    --------
    >>> import tnlib
    >>> f"{tnlib.ones((2,) * 100).norm() / 2**50:.6f}"
    '1.000000'
    """
    return TensorTrain([np.ones((1, n, 1), target) for n, target in _checked("ones", shape, dtype)])


def zeros(shape: Sequence[int], dtype: npt.DTypeLike = np.float64) -> TensorTrain:
    """Return the train with 0 in every entry; arguments as for `ones`.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.zeros((2, 3)).norm()
    0.0
    """
    return TensorTrain([np.zeros((1, n, 1), target) for n, target in _checked("zeros", shape, dtype)])


def eye(shape: Sequence[int], dtype: npt.DTypeLike = np.float64) -> TTMatrix:
    """Return the identity as a TT-matrix with row and column legs of sizes `shape`; arguments as for `ones`.

    Examples
    --------
    >>> import tnlib
    >>> float(tnlib.eye((2, 3)).full().sum())
    6.0
    """
    return TTMatrix([np.eye(n, dtype=target).reshape(1, n, n, 1) for n, target in _checked("eye", shape, dtype, 2)])


def _checked(
    function: str, shape: Sequence[int], dtype: npt.DTypeLike, legs: int = 1
) -> Iterator[tuple[int, np.dtype[Any]]]:
    """Yield the size of every leg and the dtype, validated; a core has `legs` legs of that size."""
    sizes, target = as_sizes(function, "shape", shape), as_dtype(function, dtype)
    for n in sizes:
        refuse_unallocatable(function, (n,) * legs, target)
        yield n, target
