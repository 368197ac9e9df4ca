"""Groups of equal singular values, and one basis of each that depends on nothing but the space it spans.

Singular vectors of a value that occurs once are unique but for a phase; those of a value that occurs g times are any
basis of a space of g dimensions, and what comes out of LAPACK is decided by rounding. The projector P = U U^H on the
space does not know the basis; its Cholesky factor with pivots,

    P = L L^H,    L^H L = 1,    L[pivot k, k] > 0,    L[pivot k, j] = 0 for j > k,

is an orthonormal basis of the space again, since P P = P. The pivot of a step is the first row whose length in what is
left of the space comes within a tolerance of the longest: rows that are equally long in exact arithmetic are told apart
by their places, whatever rounding did to them. For g = 1 that is the sign rule, a positive leading entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.signs import leading_phases

# Singular values are equal when they differ by less than this many eps of the norm. Normally distributed noise of 1e-15
# in every entry spreads two equal values by more than 24 only once in a million, and 16 values of normalised tensors by
# about 50. Where a basis is fixed and the rest of the tensor turned with it, the width costs nothing. An SVD, which
# tells the values apart but gives them one basis, is off by as much as they differ.
_EQUAL, _EQUAL_DIAGONAL = 256.0, 24.0


def equal_values(s: Array, resolution: float | Array) -> list[slice]:
    """Return the groups of more than one value in `s`, descending: within `resolution` of their first.

    `resolution` is one number or one for every value. Values below it are groups of roundoff, and count as well.

    >>> equal_values(np.array([2.0, 1.0, 1.0, 1.0, 0.5]), 1e-9)
    [slice(1, 4, None)]
    """
    resolution = np.broadcast_to(resolution, s.shape)
    groups, start = [], 0
    for k in range(1, len(s) + 1):
        if k == len(s) or s[start] - s[k] > resolution[start]:
            if k - start > 1:
                groups.append(slice(start, k))
            start = k
    return groups


def resolution(s: Array, dtype: np.dtype[Any], *, squared: bool = False, diagonal: bool = False) -> Array:
    """Return by how much values of `s` may differ and still be equal to what is known of them.

    `diagonal` says that they stay on a diagonal between the bases that they are in, as in an SVD.
    `squared` says that they come from a Gram matrix in double precision, which knows s[k] to eps norm(s)^2 / s[k].
    """
    if len(s) == 0 or s[0] == 0:
        return np.zeros(len(s))
    norm, width = float(np.linalg.norm(s)), _EQUAL_DIAGONAL if diagonal else _EQUAL
    known = np.full(len(s), width * float(np.finfo(dtype).eps) * norm)
    if squared:
        known += width * float(np.finfo(np.float64).eps) * norm * (norm / np.maximum(s, known))
    return known


@dataclass(frozen=True)
class Turn:
    """The unitary T, block by block, that takes left singular vectors U to the fixed ones, U T."""

    phases: Array  # (r,), those of the vectors of no group
    blocks: Sequence[tuple[slice, Array]]

    def columns(self, u: Array) -> Array:
        """Return u T of `u` (m, r)."""
        out = np.asarray(u * self.phases)
        for group, block in self.blocks:
            out[:, group] = u[:, group] @ block
        return out

    def rows(self, a: Array) -> Array:
        """Return T^H a of `a` (r, n): what belongs on the right of `columns`."""
        out = np.asarray(self.phases.conj()[:, None] * a)
        for group, block in self.blocks:
            out[group] = block.conj().T @ a[group]
        return out


def fixing_turn(u: Array, s: Array, dtype: np.dtype[Any], *, squared: bool = False, diagonal: bool = False) -> Turn:
    """Return the turn that fixes left singular vectors `u` (m, r) of values `s` (r,); the rest as in `resolution`."""
    return fix_basis(u, equal_values(s, resolution(s, dtype, squared=squared, diagonal=diagonal)), dtype)


def fix_basis(u: Array, groups: Sequence[slice], dtype: np.dtype[Any] | None = None) -> Turn:
    """Return the turn that fixes orthonormal columns `u` (m, r): a basis in every group, a phase outside of them.

    Ties are decided with the tolerance of `dtype`, in which the columns will be seen, if it is not that of `u`.
    """
    return Turn(leading_phases(u, dtype).conj(), [(g, _to_cholesky(u[:, g], dtype)[0]) for g in groups])


def nearest_tie(u: Array, groups: Sequence[slice]) -> float:
    """Return the relative change of some row's squared length in its group's space that would choose another pivot.

    Between two ties the fixed basis depends smoothly on the space. 1 at most.
    """
    inside = {k for group in groups for k in range(group.start, group.stop)}
    alone = [slice(k, k + 1) for k in range(u.shape[1]) if k not in inside]
    return min((_to_cholesky(u[:, g], None)[1] for g in [*groups, *alone]), default=1.0)


def _to_cholesky(u: Array, dtype: np.dtype[Any] | None) -> tuple[Array, float]:
    """Return the unitary t (g, g) for which u t is the pivoted Cholesky factor of u u^H, and the nearest tie."""
    tolerance = 2.0 * math.sqrt(float(np.finfo(dtype or u.dtype).eps))  # of squares
    if len(u) == u.shape[1]:  # the projector is the identity whatever the basis, and its Cholesky factor too
        return u.conj().T, 1.0
    turn = np.zeros((u.shape[1], u.shape[1]), u.dtype)
    sizes, tie = np.square(np.abs(u)).sum(axis=1, dtype=np.float64), 1.0  # squared lengths of rows in what is left
    for k in range(u.shape[1]):
        top = float(sizes.max())
        if top == 0.0:  # columns of zeros have no pivot
            return np.eye(u.shape[1], dtype=u.dtype), tie
        relative = sizes / top
        lead = int(np.argmax(relative >= 1.0 - tolerance))
        # Another row leads when one before it comes up to the threshold, or this one falls below that of the others.
        rival = float(np.delete(relative, lead).max()) if len(relative) > 1 else 0.0
        below = float(1.0 - tolerance - relative[:lead].max()) if lead else 1.0
        tie = min(tie, below, float(relative[lead]) - (1.0 - tolerance) * rival)
        direction = u[lead].conj()
        for _ in range(2):  # twice, to be orthogonal to roundoff
            direction = direction - turn[:, :k] @ (turn[:, :k].conj().T @ direction)
        turn[:, k] = direction / np.linalg.norm(direction)
        sizes = np.maximum(sizes - np.square(np.abs(u @ turn[:, k])), 0.0)
    return turn, tie
