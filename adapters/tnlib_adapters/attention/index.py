"""Numbers of layers, heads and planes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError


def as_index(function: str, parameter: str, value: Any, count: int) -> int:
    """Return a number in 0 ... count - 1; negative ones count from the end."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ArgumentTypeError(f"{function}: {parameter} must be an integer, got {value!r}; count from 0.")
    if not -count <= value < count:
        raise ArgumentError(
            f"{function}: {parameter} must lie between 0 and {count - 1}, got {value}; there are {count} of them."
        )
    return int(value) % count
