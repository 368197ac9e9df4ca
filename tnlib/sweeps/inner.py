"""Inner products of trains, with and without an operator between, from the left to the right."""

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


def sandwich_cores(a: Sequence[Array], operator: Sequence[Array], b: Sequence[Array]) -> tuple[Any, int]:
    """Return (x, e): x * 2**e is the inner product of a with operator times b; nothing has both bonds of the latter.

    Cores are (la, m, p, ra) of a, (l, m, n, r) of the operator and (lb, n, p, rb) of b.
    """
    met, twos = np.ones((1, 1, 1), np.result_type(a[0], operator[0], b[0])), 0  # la l lb
    for one, between, other in zip(a, operator, b, strict=True):
        half = np.tensordot(met, other, axes=([2], [0]))  # la l [lb] n p rb
        half = np.tensordot(half, between, axes=([1, 2], [0, 2]))  # la [l n] p rb m r
        met = np.tensordot(one.conj(), half, axes=([0, 1, 2], [0, 3, 1]))  # [la m p] ra rb r
        met = met.transpose(0, 2, 1)  # ra r rb
        e = math.frexp(largest(met))[1]
        met, twos = shift(met, -e), twos + e
    return met[0, 0, 0], twos
