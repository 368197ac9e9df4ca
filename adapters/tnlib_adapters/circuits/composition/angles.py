r"""Principal angles between two subspaces, and their distribution for random subspaces.

Let U (d, p) and V (d, q) be orthonormal bases. The singular values of U^T V are the cosines of the principal angles.
The overlap of the two subspaces is the mean squared cosine,

    ||U^T V||^2 / min(p, q),    from 0 (orthogonal) to 1 (one contains the other).

If a uniformly random rotation of n dimensions turns one of the two, its projector P has E P = 1 p / n and

    E ||U^T V||^2 = tr E[P] Q = p q / n,      Var ||U^T V||^2 = 2 p q (n - p) (n - q) / (n^2 (n - 1) (n + 2))

which gives the overlap as a number of standard deviations above chance without sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import tnlib
from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array


@dataclass(frozen=True, eq=False, repr=False)
class Angles:
    """Principal angles between two subspaces, returned by `principal_angles`.

    Parameters
    ----------
    angles
        (min(p, q),), in radians, ascending; 0 for a shared direction.
    overlap
        Mean of cos^2 of the angles.
    chance, deviation
        Mean and standard deviation of the overlap if one subspace is rotated uniformly at random.
    """

    angles: Array
    overlap: float
    chance: float
    deviation: float

    @property
    def sigmas(self) -> float:
        """Overlap minus chance in standard deviations; 0 where the deviation is 0."""
        return (self.overlap - self.chance) / self.deviation if self.deviation else 0.0

    def __repr__(self) -> str:
        least = f"{math.degrees(self.angles[0]):.1f}" if len(self.angles) else "none"
        return (
            f"Angles({len(self.angles)} from {least} degrees, overlap {self.overlap:.3f}, chance {self.chance:.3f}, "
            f"{self.sigmas:+.1f} sigma)"
        )


def principal_angles(one: Array, other: Array) -> Angles:
    """Return the principal angles between the column spaces of two matrices, with the values expected by chance.

    Parameters
    ----------
    one, other
        (d, p) and (d, q), of any rank.

    Raises
    ------
    ArgumentError
        If the two are not matrices with equally many rows.

    References
    ----------
    A. Bjorck and G. H. Golub, "Numerical methods for computing angles between linear subspaces" (1973).

    Examples
    --------
    >>> import numpy as np
    >>> principal_angles(np.eye(6)[:, :2], np.eye(6)[:, 1:3])
    Angles(2 from 0.0 degrees, overlap 0.500, chance 0.333, +1.1 sigma)
    """
    from scipy.linalg import subspace_angles

    a, b = (as_array("principal_angles", name, x, ndim=2) for name, x in (("one", one), ("other", other)))
    if len(a) != len(b):
        raise ArgumentError(
            f"principal_angles: one and other must have columns of one size, got shapes {a.shape} and {b.shape}; "
            "pass bases in one space."
        )
    u, v = (span(x) for x in (a, b))
    (p, q), n = (u.shape[1], v.shape[1]), len(a)
    mean, deviation = overlap_by_chance(np.array(p), np.array(q), n)
    if not min(p, q):
        return Angles(np.zeros(0), 0.0, 0.0, 0.0)
    overlap = float(np.square(u.T.conj() @ v).sum()) / min(p, q)
    return Angles(subspace_angles(u, v)[::-1], overlap, float(mean), float(deviation))


def overlap_by_chance(p: Array, q: Array, n: int) -> tuple[Array, Array]:
    """Return mean and standard deviation of the overlap of random p- and q-dimensional subspaces of n dimensions."""
    least = np.maximum(np.minimum(p, q), 1)
    variance = 2.0 * p * q * (n - p) * (n - q) / (n**2 * max(n - 1, 1) * (n + 2))
    return p * q / n / least, np.sqrt(np.maximum(variance, 0)) / least


def span(columns: Array) -> Array:
    """Return an orthonormal basis of the column space, (d, numerical rank)."""
    if not columns.size or not columns.any():
        return columns[:, :0]
    return np.asarray(tnlib.svd(columns).value.u)
