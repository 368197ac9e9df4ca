"""Trains, bonds and leg pairs as arguments of functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tnlib._errors import ArgumentError
from tnlib._fit import refuse_other_arrays, wrong_type
from tnlib._validate import as_integer, as_sizes
from tnlib.formats.train.format import TensorTrain, Train
from tnlib.formats.train.tt_matrix import TTMatrix


def as_train(function: str, parameter: str, t: object, *kinds: type, any_library: bool = False) -> Train:
    """Return `t`, a train of one of `kinds`: by default, a TensorTrain or a TTMatrix.

    Its cores are numpy arrays, or with `any_library` those of any library.
    """
    kinds = kinds or (TensorTrain, TTMatrix)
    if not isinstance(t, Train) or not isinstance(t, kinds):
        expected = " or ".join(f"a {kind.__name__}" for kind in kinds)
        raise wrong_type(function, parameter, expected, t, "decompose it first, for example with tnlib.tt_svd")
    if not any_library:
        refuse_other_arrays(function, parameter, t)
    return t


def as_bond(function: str, t: Train, bond: int) -> int:
    """Return the number of a bond between two cores of `t`; bond k has size t.ranks[k], negative ones included."""
    d = len(t.cores)
    if d == 1:
        raise ArgumentError(f"{function}: tt must have at least 2 cores, got 1; it has no bond to cut.")
    k = as_integer(function, "bond", bond, "bond=1")
    k = k + d + 1 if k < 0 else k
    if not 1 <= k < d:
        raise ArgumentError(
            f"{function}: bond must lie between 1 and {d - 1}, or between {-d} and -2, got {bond}; bond k lies between "
            "cores k - 1 and k."
        )
    return k


def as_leg_pairs(
    function: str, row_shape: Any, col_shape: Any, totals: Sequence[int | None] = (None, None)
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the row and column legs of a TT-matrix, equally many, whose products are `totals`."""
    rows = as_sizes(function, "row_shape", row_shape, total=totals[0])
    columns = as_sizes(function, "col_shape", col_shape, total=totals[1])
    if len(rows) != len(columns):
        raise ArgumentError(
            f"{function}: row_shape and col_shape must have as many legs as each other, got {rows} and {columns}; "
            "add legs of size 1."
        )
    return rows, columns
