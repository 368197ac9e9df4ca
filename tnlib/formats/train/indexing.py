"""Indices in square brackets, leg by leg."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib.linalg.scaling import Scaled


def parse_index(name: str, index: Any, shape: tuple[int, ...]) -> list[int | slice]:
    """Return a non-negative integer or a slice for every leg; an ellipsis and missing legs stand for whole legs."""
    is_full = type(index) is tuple and len(index) == len(shape)
    if is_full and set(map(type, index)) == {int} and min(index) >= 0 and all(map(operator.lt, index, shape)):
        return list(index)
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [k for k, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise ArgumentError(f"{name}: an index must hold one ellipsis at most, got {index}; write the others out.")
    position = ellipses[0] if ellipses else len(items)
    before, after = items[:position], items[position + 1 :]
    missing = len(shape) - len(before) - len(after)
    if missing < 0:
        raise ArgumentError(
            f"{name}: an index must have at most one entry for each of {len(shape)} legs, got "
            f"{len(before) + len(after)}; leave some out."
        )
    filled = [*before, *[slice(None)] * missing, *after]
    return [_parse_leg(name, k, item, n) for k, (item, n) in enumerate(zip(filled, shape, strict=True))]


def _parse_leg(name: str, leg: int, item: Any, n: int) -> int | slice:
    if isinstance(item, slice):
        try:
            empty = not range(n)[item]  # len() would fail where n exceeds the machine's integers
        except (TypeError, ValueError) as problem:
            raise ArgumentTypeError(
                f"{name}: the slice of leg {leg} must be of integers, got {item} ({problem}); a step must not be 0."
            ) from None
        if empty:
            raise ArgumentError(f"{name}: the slice of leg {leg} must select something of {n}, got {item}; widen it.")
        return item
    try:
        k = operator.index(item) if not isinstance(item, bool) else None
    except TypeError:
        k = None
    if k is None:
        raise ArgumentTypeError(
            f"{name}: leg {leg} must be given an integer or a slice, got {type(item).__name__}; for lists of indices "
            "there is tnlib.entries."
        )
    if not -n <= k < n:
        raise ArgumentError(f"{name}: the index of leg {leg} must lie between {-n} and {n - 1}, got {k}; count from 0.")
    return k % n


def selects_all(index: int | slice, n: int) -> bool:
    """Return True for a slice that keeps all n indices, in whatever order."""
    return isinstance(index, slice) and len(range(n)[index]) == n


def flat_to_legs(index: int, shape: tuple[int, ...]) -> list[int | slice]:
    """Return the index of every leg for a flat index of any size, the first leg the slowest.

    >>> flat_to_legs(7, (2, 3, 2))
    [1, 0, 1]
    """
    out: list[int | slice] = []
    for n in reversed(shape):
        index, k = divmod(index, n)
        out.append(k)
    return out[::-1]


def entry_of(name: str, x: Scaled, dtype: np.dtype[Any]) -> Any:
    """Return the only entry of `x` as a number of `dtype`."""
    try:
        number = x.item()
    except OverflowError:
        number = math.inf
    if abs(number) > np.finfo(dtype).max:
        raise ArgumentError(f"{name}: an entry must lie in the range of {dtype}, got one beyond; lower the log_scale.")
    return dtype.type(number)
