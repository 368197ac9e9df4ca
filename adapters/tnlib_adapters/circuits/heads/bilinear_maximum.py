r"""Maxima of a bilinear form x Omega y^T and of its quadratic form x Omega x^T over unit vectors.

    max over unit x, y of  x Omega y^T  =  the largest singular value, at x = u_1, y = v_1
    max over unit x    of  x Omega x^T  =  the largest eigenvalue of (Omega + Omega^T) / 2,   a Rayleigh quotient

The second is the Courant-Fischer maximum of the symmetric part. It is at most the first, equal only where u_1 = v_1,
and is uninformative for a head with different queries and keys. Neither is an eigenvalue of Omega.

With Omega = A B^T and [A B] = Q R, (Omega + Omega^T) / 2 = Q R (J / 2) R^T Q^T, where J exchanges the two blocks: an
eigenproblem of size 2 d_head. The form is zero on the orthogonal complement.
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
    """Maxima of a bilinear form over unit vectors, returned by `form_maximum`.

    Parameters
    ----------
    value
        Maximum of x Omega y^T over unit x and y, the largest singular value.
    left, right
        (d_model + 1,), singular vectors that attain it; one choice of several if the singular value is degenerate.
    symmetric, lowest
        Maximum and minimum of x Omega x^T over unit x.
    direction
        (d_model + 1,), eigenvector that attains `symmetric`.
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
    """Return the maximum of x Omega y^T and the extremes of x Omega x^T over unit vectors.

    Parameters
    ----------
    form
        (d, d), for example `attention.qk(head)`; `tnlib.LowRank(form.left[:-1], form.right[:, :-1])` excludes the
        biases. The product is never formed.

    Returns
    -------
    Maximum
        `value` >= max(`symmetric`, -`lowest`).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `form` is not a square LowRank.

    References
    ----------
    R. A. Horn and C. R. Johnson, "Matrix Analysis" (2nd ed., 2013), theorems 4.2.6 (Courant-Fischer) and 7.3.8.

    Examples
    --------
    A head whose queries match the negative of their own direction:

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
    features = singular_features(form)
    left, right = (features.left[:, 0], features.right[0]) if len(features) else (np.zeros(form.shape[0]),) * 2
    values, vectors = _symmetric(form)
    return Maximum(
        value=float(features.values[0]) if len(features) else 0.0,
        left=left,
        right=right,
        symmetric=float(values[-1]),
        lowest=float(values[0]),
        direction=vectors[:, -1] * leading_phases(vectors[:, -1:])[0],
    )


def _symmetric(form: LowRank) -> tuple[Array, Array]:
    """Return the smallest and largest eigenvalue of (Omega + Omega^T) / 2, ascending, and eigenvectors (d, 2)."""
    d, r = form.shape[0], form.ranks[0]
    a, b = form.left / (largest(form.left) or 1), form.right.T / (largest(form.right) or 1)
    scale = float(largest(form.left) * largest(form.right))
    q, t = qr_positive(np.hstack([a, b]))
    inner = t[:, :r] @ t[:, r:].T  # k [r] k
    values, vectors = np.linalg.eigh((inner + inner.T) / 2)
    vectors = q @ vectors
    if len(values) < d:  # the form vanishes on the orthogonal complement of both sides
        outside = _orthogonal_to(q)
        values, vectors = np.append(values, 0.0), np.column_stack([vectors, outside])
    order = np.argsort(values, kind="stable")
    ends = order[[0, -1]]
    return scale * values[ends], vectors[:, ends]


def _orthogonal_to(q: Array) -> Array:
    """Return a unit vector orthogonal to the columns of q (d, k), k < d: the projected axis of largest residual."""
    axis = np.zeros(len(q), q.dtype)
    axis[int(np.square(q).sum(axis=1).argmin())] = 1
    for _ in range(2):  # project twice for orthogonality to roundoff
        axis = axis - q @ (q.T @ axis)
    return np.asarray(axis / np.linalg.norm(axis))
