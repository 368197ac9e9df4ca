"""Canonical bases: fixed signs or phases of singular vectors, and a fixed basis where singular values are equal.

A singular vector is unique up to a phase, the vectors of equal singular values up to a unitary matrix. The phase is
fixed by the leading entry of the vector. The basis U of a subspace is fixed by its projector: U U^H has one pivoted
Cholesky factor, whose columns span the same space.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tnlib._array_api import dtype_of, eps, from_host, to_host
from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array

# Singular values are equal when they differ by less than this many eps of the norm. Normally distributed noise of 1e-15
# in every entry spreads two equal values by more than 24 only once in a million, and 16 values of normalised tensors by
# about 50. Where a basis is fixed and the rest of the tensor is transformed with it, the width costs nothing. An SVD
# keeps the values on a diagonal, which is wrong by as much as they differ.
_EQUAL, _EQUAL_DIAGONAL = 256.0, 24.0
_ALIKE = 0.99  # least quotient of equal values on a diagonal
_FEW = 64  # entries up to which extrema of lists are found faster than by two calls to numpy


@dataclass(frozen=True)
class CanonicalForm:
    """A format in canonical form, with the singular subspaces of its unfoldings."""

    value: Any
    spaces: Sequence[tuple[Array, Array]]  # orthonormal columns (m, r), in canonical bases, and singular values (r,)
    groups: Sequence[list[slice]]  # of equal values, for each of the spaces


def equal_groups(s: Array, tolerance: float | Array) -> list[slice]:
    """Return the groups of two or more equal values in `s`, descending: those within `tolerance` of their first.

    `tolerance` is one number or one for every value. Values below it form a group of roundoff.
    """
    values = s.tolist()
    tolerances = tolerance.tolist() if isinstance(tolerance, np.ndarray) else [tolerance] * len(values)
    groups, start = [], 0
    for k in range(1, len(values) + 1):
        if k == len(values) or values[start] - values[k] > tolerances[start]:
            if k - start > 1:
                groups.append(slice(start, k))
            start = k
    return groups


def equality_tolerance(
    s: Array, dtype: np.dtype[Any], *, squared: bool = False, diagonal: bool = False
) -> float | Array:
    """Return the difference below which singular values `s` (r,) of an array of `dtype` count as equal.

    `diagonal` is for an SVD, whose values stay on a diagonal between the bases. `squared` is for the roots of
    eigenvalues of a Gram matrix in double precision: s[k] is right to eps norm(s)^2 / s[k], so that every value has a
    tolerance of its own, (r,).
    """
    norm, width = math.hypot(*s.tolist()), _EQUAL_DIAGONAL if diagonal else _EQUAL
    tolerance = width * eps(dtype) * norm
    if squared and norm > 0:
        return tolerance + width * eps(np.dtype(np.float64)) * norm * (norm / np.maximum(s, tolerance))
    return tolerance


class BasisChange(NamedTuple):
    """The unitary matrix T, diagonal but for some blocks, that takes left singular vectors U to canonical ones, U T."""

    phases: Array  # (r,), the diagonal
    blocks: Sequence[tuple[slice, Array]]  # columns and unitary matrix of each block, which replace their phases

    def columns(self, u: Array) -> Array:
        """Return u T of `u` (m, r)."""
        if not isinstance(u, np.ndarray):
            return u @ from_host(self.columns(np.eye(len(self.phases), dtype=dtype_of(u))), u)
        out = np.asarray(u * self.phases)
        for group, block in self.blocks:
            out[:, group] = u[:, group] @ block
        return out

    def rows(self, a: Array) -> Array:
        """Return T^H a of `a` (r, n), the right factor that belongs to `columns`."""
        if not isinstance(a, np.ndarray):
            return from_host(self.rows(np.eye(len(self.phases), dtype=dtype_of(a))), a) @ a
        out = np.asarray(self.phases.conj()[:, None] * a)
        for group, block in self.blocks:
            out[group] = block.conj().T @ a[group]
        return out


def canonical_basis_change(
    u: Array, s: Array, dtype: np.dtype[Any], *, squared: bool = False, diagonal: bool = False
) -> BasisChange:
    """Return the change to canonical bases of left singular vectors `u` (m, r) with values `s` (r,).

    The other arguments are those of `equality_tolerance`.
    """
    tolerance = equality_tolerance(s, dtype, squared=squared, diagonal=diagonal)
    groups = equal_groups(s, tolerance)
    if diagonal and groups:  # what values of a group differ by is lost; small ones are near each other by chance
        groups = [group for group in groups if s[group.stop - 1] > _ALIKE * s[group.start]]
        lost = np.cumsum([np.square(s[group] - s[group.start]).sum() for group in groups])
        groups = groups[: np.count_nonzero(lost <= tolerance**2)]
    return group_basis_change(to_host(u), groups, dtype)


def canonical_columns(u: Array, s: Array, dtype: np.dtype[Any]) -> Array:
    """Return left singular vectors `u` (m, r) of numpy with values `s` (r,) in canonical bases."""
    values = s.tolist()
    gap = min(map(operator.sub, values, values[1:]), default=math.inf)
    if gap > _EQUAL * eps(dtype) * math.hypot(*values):
        return u * leading_phases(u, dtype).conj()
    return canonical_basis_change(u, s, dtype).columns(u)


def group_basis_change(u: Array, groups: Sequence[slice], dtype: np.dtype[Any] | None = None) -> BasisChange:
    """Return the change of orthonormal columns `u` (m, r) to a canonical basis in every group, and phases elsewhere.

    Ties are decided with the tolerance of `dtype`, that of the result, if it differs from that of `u`.
    """
    blocks = [(group, _cholesky_basis(u[:, group], dtype)[0]) for group in groups]
    return BasisChange(leading_phases(u, dtype).conj(), blocks)


def nearest_tie(u: Array, groups: Sequence[slice]) -> float:
    """Return the smallest relative change of a row's squared length in its group's space that moves a pivot, at most 1.

    Between two ties the canonical basis depends smoothly on the space.
    """
    grouped = {k for group in groups for k in range(group.start, group.stop)}
    singles = [slice(k, k + 1) for k in range(u.shape[1]) if k not in grouped]
    return min((_cholesky_basis(u[:, group], None)[1] for group in [*groups, *singles]), default=1.0)


def _cholesky_basis(u: Array, dtype: np.dtype[Any] | None) -> tuple[Array, float]:
    """Return the unitary t (g, g) for which u t is the pivoted Cholesky factor of u u^H, and the nearest tie."""
    tolerance = 2.0 * math.sqrt(eps(dtype or u.dtype))  # of squares
    if len(u) == u.shape[1]:  # the projector is the identity in every basis, and so is its Cholesky factor
        return u.conj().T, 1.0
    t = np.zeros((u.shape[1], u.shape[1]), u.dtype)
    squares, tie = np.square(np.abs(u)).sum(axis=1, dtype=np.float64), 1.0  # of the rows of the Schur complement
    for k in range(u.shape[1]):
        top = float(squares.max())
        if top == 0.0:  # columns of zeros have no pivot
            return np.eye(u.shape[1], dtype=u.dtype), tie
        relative = squares / top
        pivot = int(np.argmax(relative >= 1.0 - tolerance))
        # Another row becomes the pivot if one before it reaches the threshold, or if this one falls below that of the
        # others.
        rival = float(np.delete(relative, pivot).max()) if len(relative) > 1 else 0.0
        margin = float(1.0 - tolerance - relative[:pivot].max()) if pivot else 1.0
        tie = min(tie, margin, float(relative[pivot]) - (1.0 - tolerance) * rival)
        direction = u[pivot].conj()
        for _ in range(2):  # twice, to be orthogonal to roundoff
            direction = direction - t[:, :k] @ (t[:, :k].conj().T @ direction)
        t[:, k] = direction / np.linalg.norm(direction)
        with np.errstate(invalid="ignore"):  # vectorised BLAS may flag what lies beside these finite arrays
            column = u @ t[:, k]
        squares = np.maximum(squares - np.square(np.abs(column)), 0.0)
    return t, tie


@functools.cache
def _lead_ratio(dtype: np.dtype[Any]) -> float:
    return 1.0 - math.sqrt(eps(dtype))


def leading_phases(u: Array, dtype: np.dtype[Any] | None = None) -> Array:
    """Return the phases (r,) of the leading entries of the columns of `u` (m, r); divided by them these are positive.

    The leading entry is the first one whose modulus is within sqrt(eps) of the column's largest, so that rounding does
    not choose between entries that are equal in exact arithmetic; eps is that of `dtype`, the dtype of the result, if
    it differs from that of `u`. Zero columns get phase 1.
    """
    ratio = _lead_ratio(dtype or u.dtype)
    if u.dtype.kind == "c":
        modulus = np.abs(u)
        leads = (modulus >= ratio * np.maximum.reduce(modulus)).argmax(axis=0)
        return unit_phases(u[leads, np.arange(u.shape[1])])
    extrema: Iterable[tuple[float, float]]
    if u.size <= _FEW:
        extrema = [(max(column), min(column)) for column in u.T.tolist()]
    else:
        extrema = zip(np.maximum.reduce(u).tolist(), np.minimum.reduce(u).tolist(), strict=True)
    signs = []
    for high, low in extrema:
        if -low < ratio * high:
            signs.append(1.0)
        elif high < -ratio * low:
            signs.append(-1.0)
        else:
            signs.append(_leading_sign(u[:, len(signs)].tolist(), ratio))
    return np.array(signs, u.dtype)


def _leading_sign(column: list[float], ratio: float) -> float:
    """Return the sign of the first number whose modulus is at least `ratio` times the largest, 1 for zeros."""
    least = ratio * max(map(abs, column))
    return 1.0 if next(x for x in column if abs(x) >= least) >= 0.0 else -1.0


def unit_phases(x: Array) -> Array:
    """Return x / |x| entry by entry, 1 for zeros."""
    if x.dtype.kind != "c":
        return np.asarray(np.copysign(1.0, x + 0.0))  # the sum takes -0.0 to 0.0
    size = np.abs(x)
    return np.asarray(np.where(size > 0, x, 1) / np.where(size > 0, size, 1))


Groups: TypeAlias = list[slice]


def choose_groups(
    function: str, value: object, spectra: Sequence[Array], groups: Any, *, diagonal: bool = False
) -> list[Groups]:
    """Return one list of groups for each of the `spectra`: those passed, validated, or values equal to roundoff.

    `diagonal` marks a format of one spectrum that stays a diagonal matrix, an SVD or a LowRank: one list of groups.
    """
    if groups is None:
        return [default_groups(s, None, diagonal=diagonal) for s in spectra]
    lists = [groups] if diagonal else groups
    if not isinstance(lists, Sequence) or len(lists) != len(spectra):
        raise ArgumentError(
            f"{function}: groups must be as tnlib.degenerate_groups returns them, {len(spectra)} lists of slices for "
            f"this {type(value).__name__}, got {groups!r}; call it on the same value."
        )
    return [as_groups(function, g, len(s)) for g, s in zip(lists, spectra, strict=True)]


def as_groups(function: str, groups: Any, rank: int) -> Groups:
    """Return slices of `rank` columns, ascending and disjoint."""
    if not isinstance(groups, Sequence) or not all(isinstance(g, slice) for g in groups):
        raise ArgumentTypeError(
            f"{function}: groups must be a sequence of slices, got {groups!r}; "
            "pass what tnlib.degenerate_groups returns."
        )
    out: Groups = []
    for group in groups:
        start, stop, step = group.indices(rank)
        outside = group.stop is not None and group.stop > rank
        if step != 1 or outside or start >= stop or start < (out[-1].stop if out else 0):
            raise ArgumentError(
                f"{function}: groups must be slices of {rank} columns, ascending and disjoint, got {group}; "
                "pass what tnlib.degenerate_groups returns."
            )
        out.append(slice(start, stop))
    return out


def default_groups(s: Array, rtol: float | None, *, diagonal: bool) -> Groups:
    """Return the groups of `s`, descending and in range: values closer than `rtol` of their norm, or roundoff."""
    if rtol is None:
        return equal_groups(s, equality_tolerance(s, s.dtype, diagonal=diagonal))
    return equal_groups(s, rtol * float(np.linalg.norm(s)))
