"""What every decomposition does first: check, bring into range, measure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.linalg.scale import exponent, norm, shift


class Prepared(NamedTuple):
    """A checked array whose squares stay in range: the user's own is `x * 2**exponent`."""

    x: Array
    exponent: int
    norm: float


def prepare(function: str, parameter: str, x: Any, *, ndim: int | None = None) -> Prepared:
    """Check `x` and scale it by a power of two, exactly, where its squares could leave the range."""
    checked = as_array(function, parameter, x, ndim=ndim)
    e = exponent(checked)
    scaled = np.ascontiguousarray(shift(checked, -e))
    return Prepared(scaled, e, norm(scaled))
