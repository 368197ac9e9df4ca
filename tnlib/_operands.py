"""Operands of the arithmetic of formats: numbers, and legs that have to agree."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError


def as_number(name: str, other: Any) -> Any:
    """Return a finite number, Python's or numpy's, or None where `other` is none."""
    if isinstance(other, np.ndarray) and other.ndim == 0:
        other = other[()]
    if isinstance(other, np.ndarray):
        raise ArgumentTypeError(
            f"{name}: the other must be a format or a number, got an array of shape {other.shape}; "
            "decompose it first, or take numpy.asarray of this one."
        )
    if isinstance(other, bool | np.bool_):
        other = int(other)
    if not isinstance(other, int | float | complex | np.number):
        return None
    if isinstance(other, np.longdouble | np.clongdouble):
        raise ArgumentTypeError(
            f"{name}: a number must have at most 64 bits a component, got {other.dtype}; pass float(x) or complex(x)."
        )
    try:
        finite = cmath.isfinite(other)
    except OverflowError:  # an integer beyond every float
        finite = False
    if not finite:
        raise ArgumentError(f"{name}: a number must be finite, got {other}; replace NaN and inf first.")
    return float(other) if isinstance(other, int) else other


def refuse_different_sizes(name: str, a: Sequence[Any], b: Sequence[Any], reason: str) -> None:
    """Raise where the legs of two formats differ in number or size, naming the first one that does."""
    if len(a) != len(b):
        raise ArgumentError(f"{name}: both must have as many legs, got {len(a)} and {len(b)}; legs are not broadcast.")
    for k, (n, m) in enumerate(zip(a, b, strict=True)):
        if n != m:
            raise ArgumentError(f"{name}: leg {k} must have one size, got {n} and {m}; {reason}.")
