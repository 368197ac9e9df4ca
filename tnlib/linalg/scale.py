"""Powers of two that keep squares in range, and norms that neither overflow nor underflow."""

from __future__ import annotations

import math

import numpy as np

from tnlib._typing import Array

_BLOCK = 1 << 16  # entries converted to float64 at a time


def largest(a: Array) -> float:
    """Return the largest absolute real or imaginary part, 0 for an empty array."""
    if a.size == 0:
        return 0.0
    parts = (a.real, a.imag) if np.iscomplexobj(a) else (a,)
    return max(max(float(p.max()), -float(p.min())) for p in parts)


def exponent(a: Array) -> int:
    """Return e such that the entries of `a * 2**-e` are at most 1 in modulus of either part, and 1/2 is reached.

    Zero where the data need no scaling: squares summed over any array that fits in memory stay in range.
    """
    top = largest(a)
    safe = 2.0**40 if a.dtype in (np.float32, np.complex64) else 2.0**400
    if top == 0.0 or 1.0 / safe < top < safe:
        return 0
    return math.frexp(top)[1]


def shift(a: Array, e: int) -> Array:
    """Return `a * 2**e`, exact unless it leaves the range of the dtype; `a` itself for e = 0."""
    if e == 0:
        return a
    if np.iscomplexobj(a):
        out = np.empty_like(a)
        out.real, out.imag = np.ldexp(a.real, e), np.ldexp(a.imag, e)
        return out
    return np.ldexp(a, e)


def norm(a: Array) -> float:
    """Return the Frobenius norm, summed in float64 and free of overflow and underflow."""
    e = math.frexp(largest(a))[1]
    flat = a.reshape(-1)
    total = 0.0
    for start in range(0, flat.size, _BLOCK):
        block = shift(flat[start : start + _BLOCK], -e)
        wide = block.astype(np.complex128 if np.iscomplexobj(block) else np.float64, copy=False)
        total += float(np.vdot(wide, wide).real)
    return math.ldexp(math.sqrt(total), e)


def distance(a: Array, b: Array) -> float:
    """Return norm(a - b) without holding the difference: the true residual, one slab of the first leg at a time."""
    rows = max(1, _BLOCK * len(a) // max(1, a.size))
    parts = [norm(a[i : i + rows] - b[i : i + rows]) for i in range(0, len(a), rows)]
    return norm(np.array(parts))
