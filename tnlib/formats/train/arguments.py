"""Trains and bonds as arguments of functions."""

from __future__ import annotations

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._validate import as_count
from tnlib.formats.train.format import TensorTrain, Train
from tnlib.formats.train.tt_matrix import TTMatrix


def as_train(function: str, parameter: str, t: object, *kinds: type) -> Train:
    """Return `t`, a train of one of `kinds`: by default, a TensorTrain or a TTMatrix."""
    kinds = kinds or (TensorTrain, TTMatrix)
    if not isinstance(t, Train) or not isinstance(t, kinds):
        expected = " or a ".join(kind.__name__ for kind in kinds)
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a {expected}, got a {type(t).__name__}; "
            "decompose it first, for example with tnlib.tt_svd."
        )
    return t


def as_bond(function: str, t: Train, bond: int) -> int:
    """Return the number of a bond between two cores of `t`; bond k has size t.ranks[k], negative ones included."""
    if len(t.cores) == 1:
        raise ArgumentError(f"{function}: tt must have at least 2 cores, got 1; it has no bond to cut.")
    k = as_count(function, "bond", bond, least=-len(t.cores) - 1)
    k += len(t.cores) + 1 if k < 0 else 0
    if not 1 <= k < len(t.cores):
        raise ArgumentError(
            f"{function}: bond must lie between 1 and {len(t.cores) - 1}, got {bond}; "
            "bond k lies between cores k - 1 and k."
        )
    return k
