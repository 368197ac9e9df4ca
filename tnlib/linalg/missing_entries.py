"""Arrays with missing entries: numpy masked arrays, whose mask is True where an entry is missing."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.scaling import norm


def fill_missing(function: str, parameter: str, x: Any) -> tuple[Any, Array | None]:
    """Return `x` with zeros in place of missing entries, and the array that is True where an entry is known.

    Return `x` itself, or its data, and None if no entry is missing.
    """
    if not isinstance(x, np.ma.MaskedArray):
        return x, None
    known = ~np.ma.getmaskarray(x)
    if known.all():
        return x.data, None
    for leg in range(known.ndim):
        unknown = np.flatnonzero(~known.any(axis=tuple(k for k in range(known.ndim) if k != leg)))
        if len(unknown):
            raise ArgumentError(
                f"{function}: {parameter} must have a known entry at every index of every leg, got none at index "
                f"{unknown[0]} of leg {leg}; remove that index."
            )
    return x.filled(0), known


def residual_of_known(x: Array, known: Array, approximation: Array) -> float:
    """Return the Frobenius norm of x - approximation over the `known` entries."""
    return norm((x - approximation)[known])


def describe_known(known: Array) -> str:
    """Return the note of a fit whose error is that of the known entries."""
    return f"the error is that of the {np.count_nonzero(known):,} known of {known.size:,} entries"
