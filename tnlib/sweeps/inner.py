"""The inner product of two trains, from the left to the right, with its power of two apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scale import largest, shift


def inner_cores(a: Sequence[Array], b: Sequence[Array]) -> tuple[Any, int]:
    """Return (x, e): x * 2**e is the sum over all legs of conj(a) times b, for cores (l, n, r) of both in range."""
    met, twos = np.ones((1, 1), np.result_type(a[0], b[0])), 0  # la lb
    for one, other in zip(a, b, strict=True):
        moved = met @ other.reshape(len(other), -1)  # la [lb] n rb
        both = moved.reshape(-1, other.shape[2])  # (la n) rb
        met = one.reshape(-1, one.shape[2]).conj().T @ both  # ra [(la n)] rb
        e = math.frexp(largest(met))[1]
        met, twos = shift(met, -e), twos + e
    return met[0, 0], twos
