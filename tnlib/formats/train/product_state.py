"""Product states: one vector per leg, all bonds of size 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from tnlib._typing import Array
from tnlib._validate import as_array, as_list
from tnlib.formats.train.format import TensorTrain


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
