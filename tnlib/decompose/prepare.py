"""What every decomposition does first: check, bring into range, measure."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib._validate import as_numbers, refuse_infinite
from tnlib.linalg.scale import exponent, in_range, norm, shift, squares


class Prepared(NamedTuple):
    """A checked array whose squares stay in range: the user's own is `x * 2**exponent`."""

    x: Array
    exponent: int
    norm: float


def prepare(function: str, parameter: str, x: Any, *, ndim: int | None = None) -> Prepared:
    """Check `x` and scale it by a power of two, exactly, where its squares could leave the range."""
    a = np.ascontiguousarray(as_numbers(function, parameter, x, ndim=ndim))
    length = math.sqrt(squares(a))  # one pass over a large array: NaN, inf and overflow show in it too
    if not math.isfinite(length):
        refuse_infinite(function, parameter, a)
    if in_range(a, length):
        return Prepared(a, 0, length)
    e = exponent(a)
    scaled = shift(a, -e)
    return Prepared(scaled, e, norm(scaled))
