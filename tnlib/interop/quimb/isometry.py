"""Isometric tensors: the distance of a tensor from an isometry between two groups of its legs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_legs
from tnlib.linalg import orthogonal
from tnlib.linalg.multilinear import matrix_from

if TYPE_CHECKING:
    import quimb.tensor as qtn  # one second, which arrays need not wait for


def isometry_error(a: Array | qtn.Tensor, legs: int | str | Sequence[int] | Sequence[str]) -> float:
    """Return the Frobenius norm of Q^H Q - 1, Q the matrix of `a` from the group `legs` to its other legs.

    It is at least 1 where the other legs have fewer entries than `legs`.

    Parameters
    ----------
    a
        An array, or a quimb Tensor.
    legs
        Some, not all, legs of `a`: leg numbers of an array, names of indices of a Tensor.

    Examples
    --------
    >>> import numpy as np
    >>> isometry_error(np.eye(3)[:, :2], 1), isometry_error(np.eye(3)[:, :2], 0)
    (0.0, 1.0)
    """
    return orthogonal.isometry_error(_as_matrix("isometry_error", a, legs))


def is_isometry(a: Array | qtn.Tensor, legs: int | str | Sequence[int] | Sequence[str]) -> bool:
    """Test if `isometry_error(a, legs)`, of the same arguments, is roundoff: 10,000 eps times the root of the columns.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> u, s, vh = tnlib.svd(np.arange(24.0).reshape(2, 3, 4), left=(0, 1)).value
    >>> is_isometry(u, 2), is_isometry(vh, 0), is_isometry(2 * u, 2)
    (True, True, False)
    """
    return orthogonal.is_isometry(_as_matrix("is_isometry", a, legs))


def _as_matrix(function: str, a: Any, legs: Any) -> Array:
    """Return `a` as a matrix (other legs, legs)."""
    is_tensor = hasattr(a, "inds")
    data = as_array(function, "a", a.data if is_tensor else a)
    if is_tensor:
        names = (legs,) if isinstance(legs, str) else legs
        if not isinstance(names, Sequence) or not all(isinstance(i, str) for i in names):
            raise ArgumentTypeError(
                f"{function}: legs must be names of indices, got {names!r}; pass some of {', '.join(a.inds)}."
            )
        if unknown := [i for i in names if i not in a.inds]:
            raise ArgumentError(
                f"{function}: legs must name indices of the tensor, got {unknown[0]}; there are {', '.join(a.inds)}."
            )
        legs = [a.inds.index(i) for i in names]
    return matrix_from(data, as_legs(function, "legs", legs, data.ndim))
