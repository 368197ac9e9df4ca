"""Powers of two that keep squares in range, and norms that neither overflow nor underflow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.threads import count, cut, spread

_BLOCK = 1 << 18  # entries summed at a time
_SAFE_SQUARES = (1e-200, 1e250)  # sums of squares in which no part that matters was lost


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
    top, safe = largest(a), _safe(a)
    if top == 0.0 or 1.0 / safe < top < safe:
        return 0
    return math.frexp(top)[1]


def in_range(a: Array, length: float) -> bool:
    """Say whether `exponent` would be 0, where the Frobenius norm `length` alone shows it."""
    safe = _safe(a)
    return math.sqrt(a.size) / safe < length < min(safe, math.sqrt(_SAFE_SQUARES[1]))


def _safe(a: Array) -> float:
    return 2.0**40 if a.dtype in (np.float32, np.complex64) else 2.0**400


def column_exponents(a: Array) -> Array:
    """Return, for each column of `a` (m, r), the e that brings its largest part into [1/2, 1); 0 for zero columns."""
    top = np.abs(a.real).max(axis=0)
    if np.iscomplexobj(a):
        top = np.maximum(top, np.abs(a.imag).max(axis=0))
    return np.asarray(np.frexp(top)[1])


def shift(a: Array, e: int | Array) -> Array:
    """Return `a * 2**e`, e one number or one per column, exact within the range of the dtype; `a` itself for e = 0."""
    if np.ndim(e) == 0 and e == 0:
        return a
    if np.iscomplexobj(a):
        out = np.empty_like(a)
        out.real, out.imag = np.ldexp(a.real, e), np.ldexp(a.imag, e)
        return out
    return np.asarray(np.ldexp(a, e))


def norm(a: Array) -> float:
    """Return the Frobenius norm, summed in float64 and free of overflow and underflow; inf or NaN where `a` has one."""
    total = squares(a)
    if _SAFE_SQUARES[0] < total < _SAFE_SQUARES[1] or math.isnan(total):
        return math.sqrt(total)
    top = largest(a)
    if top == 0.0 or not math.isfinite(top):
        return top
    e = math.frexp(top)[1]
    flat = a.reshape(-1)
    parts = (squares(shift(flat[i : i + _BLOCK], -e)) for i in range(0, flat.size, _BLOCK))
    return math.ldexp(math.sqrt(math.fsum(parts)), e)


def squares(a: Array) -> float:
    """Return the sum of the squares of all moduli in float64: one pass, in blocks so that rounding stays small."""
    flat = np.ascontiguousarray(a).reshape(-1)  # in one order, so that the layout of `a` does not change a bit
    if np.iscomplexobj(flat):
        flat = flat.view(flat.real.dtype)
    parts = np.zeros(-(-flat.size // _BLOCK))

    def add(first: int, last: int) -> None:
        with np.errstate(all="ignore"):  # what overflows is seen in the sum
            for k in range(first, last):
                block = flat[k * _BLOCK : (k + 1) * _BLOCK].astype(np.float64, copy=False)
                parts[k] = np.dot(block, block)

    spread(add, cut(len(parts), count() if len(parts) > 8 else 1))
    return float(parts.sum())


def distance(a: Array, b: Array) -> float:
    """Return norm(a - b) without holding the difference: the true residual, one slab of the first leg at a time."""
    rows = max(1, _BLOCK * len(a) // max(1, a.size))
    parts = [norm(a[i : i + rows] - b[i : i + rows]) for i in range(0, len(a), rows)]
    return norm(np.array(parts))


def as_scalar(x: Any, e: int) -> float | complex:
    """Return x * 2**e as a Python number; raises OverflowError where that leaves the range of float64."""
    if np.iscomplexobj(x):
        return complex(math.ldexp(float(x.real), e), math.ldexp(float(x.imag), e))
    return math.ldexp(float(x), e)
