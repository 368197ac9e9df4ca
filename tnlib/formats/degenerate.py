"""Groups of equal singular values in a format: the default ones, and validation of those passed by a caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib.linalg.canonical_basis import equal_groups, equality_tolerance

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
