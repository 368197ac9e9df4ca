"""What stands between square brackets, leg by leg."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib.linalg.scale import as_scalar


def per_leg(name: str, index: Any, shape: tuple[int, ...]) -> list[int | slice]:
    """Return an integer from 0 or a slice for every leg; an ellipsis, or what is left out, stands for whole legs."""
    given = list(index) if isinstance(index, tuple) else [index]
    if sum(one is Ellipsis for one in given) > 1:
        raise ArgumentError(f"{name}: an index must hold one ellipsis at most, got {index}; write the others out.")
    if not any(one is Ellipsis for one in given):
        given.append(Ellipsis)
    at = next(k for k, one in enumerate(given) if one is Ellipsis)
    rest = len(shape) - (len(given) - 1)
    if rest < 0:
        raise ArgumentError(
            f"{name}: an index must have at most one entry for each of {len(shape)} legs, got {len(given) - 1}; "
            "leave some out."
        )
    filled = [*given[:at], *[slice(None)] * rest, *given[at + 1 :]]
    return [_one(name, k, one, n) for k, (one, n) in enumerate(zip(filled, shape, strict=True))]


def _one(name: str, leg: int, given: Any, n: int) -> int | slice:
    if isinstance(given, slice):
        try:
            empty = not range(n)[given]  # n may be beyond what len() can count
        except (TypeError, ValueError) as problem:
            raise ArgumentTypeError(
                f"{name}: the slice of leg {leg} must be of integers, got {given} ({problem}); a step must not be 0."
            ) from None
        if empty:
            raise ArgumentError(f"{name}: the slice of leg {leg} must select something of {n}, got {given}; widen it.")
        return given
    try:
        k = operator.index(given) if not isinstance(given, bool) else None
    except TypeError:
        k = None
    if k is None:
        raise ArgumentTypeError(
            f"{name}: leg {leg} must be given an integer or a slice, got {type(given).__name__}; for lists of indices "
            "there is tnlib.entries."
        )
    if not -n <= k < n:
        raise ArgumentError(f"{name}: the index of leg {leg} must lie between {-n} and {n - 1}, got {k}; count from 0.")
    return k % n


def select(cores: Sequence[Array], given: Sequence[int | slice]) -> list[Array]:
    """Return cores (l, n, r) cut as asked, and matrices (l, r) where one index is."""
    return [core[:, i] for core, i in zip(cores, given, strict=True)]


def n_kept(index: int | slice, n: int) -> int:
    """Return how many of n indices are asked for."""
    return 1 if isinstance(index, int) else len(range(n)[index])


def as_entry(name: str, x: Any, twos: int, dtype: np.dtype[Any]) -> Any:
    """Return x * 2**twos as a number of `dtype`."""
    try:
        number = as_scalar(x, twos)
    except OverflowError:
        number = math.inf
    if abs(number) > np.finfo(dtype).max:
        raise ArgumentError(f"{name}: an entry must lie in the range of {dtype}, got one beyond; lower the log_scale.")
    return dtype.type(number)


def digits(index: int, shape: tuple[int, ...]) -> list[int | slice]:
    """Return the index of every leg of a flat index, the first leg the slowest; of any size.

    >>> digits(7, (2, 3, 2))
    [1, 0, 1]
    """
    out: list[int | slice] = []
    for n in reversed(shape):
        index, k = divmod(index, n)
        out.append(k)
    return out[::-1]
