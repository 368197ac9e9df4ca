r"""The largest value of a bilinear form, and the largest of its quadratic form, which is another thing.

    max over unit x, y of  x Omega y^T  =  the largest singular value, at x = u_1, y = v_1
    max over unit x    of  x Omega x^T  =  the largest eigenvalue of (Omega + Omega^T) / 2,   a Rayleigh quotient

The second is what Courant and Fischer speak of. It is at most the first, equal only where u_1 = v_1, and says nothing
of a head whose queries and keys look for different things. Neither is an eigenvalue of Omega.

With Omega = A B^T and [A B] = Q R, (Omega + Omega^T) / 2 = Q R (J / 2) R^T Q^T, J the exchange of the two blocks: an
eigenproblem of twice the width of a head, and zero on what neither side reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, LowRank
from tnlib._typing import Array
from tnlib.linalg.canonical_basis import leading_phases
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scaling import largest
from tnlib_adapters.circuits.heads.singular_features import singular_features


@dataclass(frozen=True, eq=False, repr=False)
class Maximum:
    """How large a form gets on unit vectors; made by `form_maximum`.

    Parameters
    ----------
    value
        The maximum of x Omega y^T over unit x and y, the largest singular value.
    left, right
        (d_model + 1,), where it is attained: one of the places, where the value is degenerate.
    symmetric, lowest
        The maximum and the minimum of x Omega x^T over unit x.
    direction
        (d_model + 1,), where `symmetric` is attained.
    """

    value: float
    left: Array
    right: Array
    symmetric: float
    lowest: float
    direction: Array

    def __repr__(self) -> str:
        return (
            f"Maximum({self.value:.4g} over pairs of unit vectors; of one with itself from {self.lowest:.4g} to "
            f"{self.symmetric:.4g})"
        )


def form_maximum(form: LowRank) -> Maximum:
    """Return the maximum of x Omega y^T over unit vectors, and beside it the extremes of x Omega x^T.

    Parameters
    ----------
    form
        (d, d), `attention.qk(head)`; `tnlib.LowRank(form.left[:-1], form.right[:, :-1])` leaves the biases out. It is
        never multiplied out.

    Returns
    -------
    Maximum
        `value` >= max(`symmetric`, -`lowest`).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `form` is no square LowRank.

    References
    ----------
    R. A. Horn and C. R. Johnson, "Matrix Analysis" (2nd ed., 2013), theorems 4.2.6 (Courant-Fischer) and 7.3.8.

    Examples
    --------
    A head whose queries look for the opposite of themselves:

    >>> import numpy as np, tnlib
    >>> form_maximum(tnlib.LowRank(np.eye(3)[:, :1], -3 * np.eye(3)[:1]))
    Maximum(3 over pairs of unit vectors; of one with itself from -3 to 0)
    """
    if not isinstance(form, LowRank):
        raise ArgumentTypeError(
            f"form_maximum: form must be a LowRank, got {type(form).__name__}; pass attention.qk(head)."
        )
    if form.shape[0] != form.shape[1]:
        raise ArgumentError(f"form_maximum: form must be square, got shape {form.shape}; pass attention.qk(head).")
    found = singular_features(form)
    left, right = (found.left[:, 0], found.right[0]) if len(found) else (np.zeros(form.shape[0]),) * 2
    values, vectors = _symmetric(form)
    return Maximum(
        value=float(found.values[0]) if len(found) else 0.0,
        left=left,
        right=right,
        symmetric=float(values[-1]),
        lowest=float(values[0]),
        direction=vectors[:, -1] * leading_phases(vectors[:, -1:])[0],
    )


def _symmetric(form: LowRank) -> tuple[Array, Array]:
    """Return the least and the largest eigenvalue of (Omega + Omega^T) / 2, ascending, and their vectors (d, 2)."""
    d, r = form.shape[0], form.ranks[0]
    a, b = form.left / (largest(form.left) or 1), form.right.T / (largest(form.right) or 1)
    scale = float(largest(form.left) * largest(form.right))
    q, t = qr_positive(np.hstack([a, b]))
    inner = t[:, :r] @ t[:, r:].T  # k [r] k
    values, vectors = np.linalg.eigh((inner + inner.T) / 2)
    vectors = q @ vectors
    if len(values) < d:  # zero on everything that is orthogonal to both sides
        outside = _orthogonal_to(q)
        values, vectors = np.append(values, 0.0), np.column_stack([vectors, outside])
    order = np.argsort(values, kind="stable")
    ends = order[[0, -1]]
    return scale * values[ends], vectors[:, ends]


def _orthogonal_to(q: Array) -> Array:
    """Return a unit vector orthogonal to the columns of q (d, k), k < d: what is left of the axis least in them."""
    axis = np.zeros(len(q), q.dtype)
    axis[int(np.square(q).sum(axis=1).argmin())] = 1
    for _ in range(2):  # twice, to be orthogonal to roundoff
        axis = axis - q @ (q.T @ axis)
    return np.asarray(axis / np.linalg.norm(axis))
