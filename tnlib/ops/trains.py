"""Trains of both kinds taken apart into plain cores within range, and put together again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.linalg.scale import norm, shift
from tnlib.sweeps.dense import fuse_row_and_column
from tnlib.sweeps.scale import even_out

T = TypeVar("T", TensorTrain, TTMatrix)

_IN_RANGE = 100  # powers of two that a core may carry, of 127 in single precision


def as_train(function: str, parameter: str, t: object, *kinds: type) -> None:
    """Raise where `t` is none of `kinds`: by default, neither a TensorTrain nor a TTMatrix."""
    kinds = kinds or (TensorTrain, TTMatrix)
    if not isinstance(t, kinds):
        expected = " or a ".join(kind.__name__ for kind in kinds)
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a {expected}, got a {type(t).__name__}; "
            "decompose what you have first, for example with tnlib.tt_svd."
        )


def as_bond(function: str, t: TensorTrain | TTMatrix, bond: int) -> int:
    """Return the number of a bond between two cores of `t`."""
    bond, last = as_count(function, "bond", bond), len(t.cores) - 1
    if last == 0:
        raise ArgumentError(f"{function}: tt must have at least 2 cores, got 1; it has no bond to cut.")
    if bond > last:
        raise ArgumentError(
            f"{function}: bond must lie between 1 and {last}, got {bond}; bond k lies between cores k - 1 and k."
        )
    return bond


def take_apart(t: TensorTrain | TTMatrix) -> tuple[list[Array], int, float]:
    """Return cores (l, n, r) of one dtype and in range, legs in pairs, and (twos, factor): see `even_out`."""
    cores = t.cores if isinstance(t, TensorTrain) else fuse_row_and_column(t.cores)
    cores, twos, factor = even_out(cores, t.log_scale)
    return [core.astype(t.dtype, copy=False) for core in cores], twos, factor


def put_together(t: T, cores: Sequence[Array], center: int, twos: int, factor: float) -> T:
    """Return 2**twos * factor times the train of `cores`, as a train of the kind of `t`; core `center` takes the scale.

    Where that would leave the range of its dtype, `log_scale` does.
    """
    cores = list(cores)
    middle = cores[center] * cores[center].real.dtype.type(factor)
    held = math.frexp(norm(middle))[1]
    left_over = 0 if abs(held + twos) <= _IN_RANGE else twos
    cores[center] = shift(middle, twos - left_over)
    log_scale = left_over * math.log(2)
    if isinstance(t, TensorTrain):
        return type(t)(tuple(cores), center, log_scale)
    split = [
        np.ascontiguousarray(core).reshape(len(core), *old.shape[1:3], -1)  # l m n r
        for core, old in zip(cores, t.cores, strict=True)
    ]
    return type(t)(tuple(split), center, log_scale)
