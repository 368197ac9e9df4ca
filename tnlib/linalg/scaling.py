"""Scaling by powers of two, and norms that neither overflow nor underflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from tnlib._array_api import (
    AnyArray,
    all_finite,
    astype,
    detached,
    dtype_of,
    from_host,
    is_complex,
    namespace,
    reshape,
    to_host,
)
from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_numbers, is_other_array, refuse_infinite
from tnlib.linalg.threads import run_parallel, split_range, thread_count

_BLOCK = 1 << 18  # entries summed at a time
_ROW = 1 << 12  # entries of one sum: over longer ones of sorted or equal terms, rounding goes in one direction
_SAFE_SQUARES = (1e-200, 1e250)  # sums of squares in this range lost no significant term
_SAFE_NORM = 1e125
_FOLDED = 500  # powers of two that `fold` may multiply a norm with, before it looks at the largest entry
_NEAR_ONE = (2.0**-40, 2.0**60)  # sums of squares of arrays that a sweep does not rescale
DRIFT = 32  # powers of two by which a product in a sweep may leave [1/2, 1) before it is rescaled
_LN2 = Fraction(0x162E42FEFA39EF35793C7673007E5ED5, 1 << 125)  # log(2) to 125 bits
_FAR = 1 << 14  # powers of two beyond every dtype
_LARGEST_STEP = 100  # powers of two in one product, in the range of 32 bits


class Scaled(NamedTuple):
    """`array` * 2**`exponent`, an array whose range exceeds that of its dtype."""

    array: Array
    exponent: int = 0

    def update(self, array: Array) -> Scaled:
        """Return `array` * 2**exponent, rescaled: the result of a linear map of this array."""
        return rescale_drift(array, self.exponent)

    def log2_norm(self) -> float:
        """Return the binary logarithm of the Frobenius norm, -inf for zero."""
        size = norm(self.array)
        return math.log2(size) + self.exponent if size > 0 else -math.inf

    def norm(self) -> float:
        """Return the Frobenius norm; raises OverflowError beyond the range of float64."""
        return math.ldexp(norm(self.array), self.exponent)

    def item(self) -> float | complex:
        """Return the only entry as a Python number; raises OverflowError beyond the range of float64."""
        x = self.array.reshape(-1)[0]
        if np.iscomplexobj(x):
            return complex(math.ldexp(float(x.real), self.exponent), math.ldexp(float(x.imag), self.exponent))
        return math.ldexp(float(x), self.exponent)


def rescale_drift(array: Array, exponent: int) -> Scaled:
    """Return `array` * 2**`exponent`, rescaled where a sweep has left the neighbourhood of 1."""
    if isinstance(array, np.ndarray) and 0 < (square := sum_of_squares(array)) < math.inf:
        if _NEAR_ONE[0] < square < _NEAR_ONE[1]:
            return Scaled(array, exponent)
        e = math.frexp(square)[1] // 2
        return Scaled(shift(array, -e), exponent + e)
    e = math.frexp(largest(array))[1]
    return Scaled(array, exponent) if abs(e) < DRIFT else Scaled(shift(array, -e), exponent + e)


def is_near_one(a: Array) -> bool:
    """Test if `a` is an array of numpy that is finite and need not be rescaled; False where this is not cheap."""
    return isinstance(a, np.ndarray) and _NEAR_ONE[0] < sum_of_squares(a) < _NEAR_ONE[1]


def rescale(a: Array, exponent: int = 0, *, dtype: np.dtype[Any] | None = None) -> Scaled:
    """Return `a` * 2**`exponent` with squares and products of entries in the range of `dtype`: see `exponent_of`."""
    e = exponent_of(a, dtype)
    return Scaled(shift(a, -e), exponent + e)


def rescale_each(arrays: Iterable[Array], *, dtype: np.dtype[Any] | None = None) -> tuple[list[Array], int]:
    """Return every array as `rescale` does, and the sum of their exponents: the scale of a product of them."""
    scaled = [rescale(a, dtype=dtype) for a in arrays]
    return [a for a, _ in scaled], sum(e for _, e in scaled)


def prepare_each(function: str, noun: str, arrays: Sequence[Array]) -> tuple[list[Array], int]:
    """Return `rescale_each` of arrays, those of numpy refused where one is not finite; messages call it "noun k".

    The sum of squares of an array answers both questions.
    """
    out, power = [], 0
    for k, a in enumerate(arrays):
        if not is_near_one(a):
            if isinstance(a, np.ndarray):
                refuse_infinite(function, f"{noun} {k}", a)
            a, power = rescale(a, power)
        out.append(a)
    return out, power


def normalize(a: Array, exponent: int = 0) -> Scaled:
    """Return `a` * 2**`exponent` with the largest real or imaginary part of `array` in [1/2, 1)."""
    e = math.frexp(largest(a))[1]
    return Scaled(shift(a, -e), exponent + e)


def fold(a: Array, exponent: int) -> Scaled:
    """Return `a` * 2**`exponent` with exponent 0 where the array alone stays in a safe range."""
    if exponent == 0:
        return Scaled(a, 0)
    if isinstance(a, np.ndarray) and abs(exponent) < _FOLDED:
        length = math.ldexp(min(_SAFE_NORM, math.sqrt(sum_of_squares(a))), exponent)
        if in_safe_range(length, a.size, a.dtype):
            return Scaled(shift(a, exponent), 0)
    limit, exponent_of_largest = math.log2(_safe(dtype_of(a))), math.frexp(largest(a))[1] + exponent
    return Scaled(shift(a, exponent), 0) if 1 - limit < exponent_of_largest < limit else Scaled(a, exponent)


def split_exponential(x: float) -> tuple[int, float]:
    """Return e and f with exp(x) = 2**e * f, 0.7 < f < 1.5, f right to roundoff however large `x` is."""
    e = round(x / math.log(2))
    if x == e * math.log(2):  # what `Train.log_scale` makes of 2**e
        return e, 1.0
    return e, math.exp(Fraction(x) - e * _LN2)


def largest(a: Array) -> float:
    """Return the largest absolute real or imaginary part, 0 for an empty array."""
    if not isinstance(a, np.ndarray):
        xp, a = namespace(a), detached(a)
        return max(float(xp.max(xp.abs(part))) for part in _real_parts(a))
    if a.size == 0:
        return 0.0
    parts = (a.real, a.imag) if a.dtype.kind == "c" else (a,)
    return max(max(float(p.max()), -float(p.min())) for p in parts)


def sum_of_squares(a: Array) -> float:
    """Return the sum of the squares of all moduli in the precision of `a`, inf where it is not worth computing.

    It is one product of vectors, and for small arrays several times as fast as two extrema.
    """
    if a.size > _BLOCK and not a.flags.forc:
        return math.inf  # it would be copied
    flat = a.ravel(order="K")
    return float(np.vdot(flat, flat).real)  # of which, unlike other products, numpy does not warn


def exponent_of(a: Array, dtype: np.dtype[Any] | None = None) -> int:
    """Return e such that the largest part of `a * 2**-e` is in [1/2, 1), 0 for data that need no scaling.

    Sums of their squares over any array that fits in memory stay in range of `dtype`, by default that of `a`.
    """
    if isinstance(a, np.ndarray) and in_safe_range(math.sqrt(sum_of_squares(a)), a.size, dtype or a.dtype):
        return 0
    top, safe = largest(a), _safe(dtype or dtype_of(a))
    if top == 0.0 or 1.0 / safe < top < safe:
        return 0
    return math.frexp(top)[1]


def in_safe_range(length: float, size: int, dtype: np.dtype[Any]) -> bool:
    """Test if an array of `size` entries of this Frobenius norm needs no scaling."""
    safe = _safe(dtype)
    return math.sqrt(size) / safe < length < min(safe, _SAFE_NORM)


def _safe(dtype: np.dtype[Any]) -> float:
    return 2.0**40 if dtype.char in "fF" else 2.0**400


def column_exponents(a: Array) -> Array:
    """Return, for each column of `a` (m, r), the e that brings its largest part into [1/2, 1); 0 for zero columns."""
    top = np.abs(a.real).max(axis=0)
    if a.dtype.kind == "c":
        top = np.maximum(top, np.abs(a.imag).max(axis=0))
    return np.asarray(np.frexp(top)[1])


def normalize_rows(rows: Array) -> tuple[Array, Array]:
    """Return contiguous rows (N, r) divided by powers of two, and the exponents (N,) of these.

    If the squares of all rows are far from the limits of their dtype, none is divided. Otherwise the largest part of
    each lies in [1/2, 1).
    """
    with np.errstate(over="ignore"):
        square = np.vecdot(rows, rows).real
    limit = _safe(rows.dtype)
    if len(rows) and 1 / limit < square.min() and square.max() < limit:
        return rows, np.zeros(len(rows), np.int64)
    parts = rows.view(rows.real.dtype)
    e = np.frexp(np.abs(parts).max(axis=1, initial=0.0))[1]
    return np.ldexp(parts, -e[:, None]).view(rows.dtype), e.astype(np.int64)


def shift(a: Array, e: int | Array) -> Array:
    """Return `a * 2**e`, e one number or an array, exact within the range of the dtype; `a` itself for e = 0."""
    if isinstance(e, int):
        if e == 0:
            return a
        e = max(-_FAR, min(_FAR, e))
    if not isinstance(a, np.ndarray):
        if isinstance(e, int):
            return _shift_by_steps(a, e)
        return a * from_host(np.ldexp(np.ones(1, np.finfo(dtype_of(a)).dtype), e), a)
    if a.dtype.kind == "c":
        out = np.empty_like(a)
        out.real, out.imag = np.ldexp(a.real, e), np.ldexp(a.imag, e)
        return out
    return np.asarray(np.ldexp(a, e))


def shift_in_range(a: Array, e: int | Array, subject: str, advice: str) -> Array:
    """Return `a` * 2**`e`, or raise "`subject` must lie in the range of float64, got about 10**400; `advice`."."""
    if isinstance(e, int) and e <= 0:
        return shift(a, e)
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = shift(a, e)
    if np.max(e) > 0 and not all_finite(shifted):
        top = (math.log2(largest(a)) + float(np.max(e))) * math.log10(2)
        raise ArgumentError(f"{subject} must lie in the range of {dtype_of(a)}, got about 10**{top:.0f}; {advice}.")
    return shifted


def restore(function: str, parameter: str, a: Array, exponent: int) -> Array:
    """Return `a` * 2**`exponent`, a part of the decomposition of `parameter`, in the range of its dtype."""
    advice = "scale it down" if a.dtype.char in "dD" else "scale it down, or convert it to 64 bits"
    return shift_in_range(a, exponent, f"{function}: the norm of {parameter}", advice)


def norm(a: Array) -> float:
    """Return the Frobenius norm, summed in float64 and free of overflow and underflow; inf or NaN where `a` has one."""
    if not isinstance(a, np.ndarray):
        return _norm_of_other(a)
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
    """Return the sum of the squares of all moduli in float64, inf if it overflows; in blocks, to limit rounding."""
    flat = np.ascontiguousarray(a)  # in C order, so that the memory layout does not change the result
    if flat.size <= _ROW and flat.dtype.char == "d":
        return float(np.vdot(flat, flat))  # which flattens
    flat = flat.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    if flat.size <= _BLOCK:
        return _dot_with_itself(flat)
    parts = np.zeros(-(-flat.size // _BLOCK))

    def add(first: int, last: int) -> None:
        for k in range(first, last):
            parts[k] = _dot_with_itself(flat[k * _BLOCK : (k + 1) * _BLOCK])

    run_parallel(add, split_range(len(parts), thread_count() if len(parts) > 8 else 1))
    with np.errstate(over="ignore"):
        return float(parts.sum())


def _dot_with_itself(flat: Array) -> float:
    if flat.dtype.char != "d":
        flat = flat.astype(np.float64)
    stop = flat.size // _ROW * _ROW
    rows, last = flat[:stop].reshape(-1, _ROW), flat[stop:]
    with np.errstate(over="ignore"):
        return float(np.vecdot(rows, rows).sum() + np.vdot(last, last))


def _real_parts(a: AnyArray) -> tuple[AnyArray, ...]:
    xp = namespace(a)
    return (xp.real(a), xp.imag(a)) if is_complex(a) else (a,)


def _shift_by_steps(a: AnyArray, e: int) -> AnyArray:
    """Return `a` * 2**`e` of another library by products, exact within the range of 32 bits."""
    with np.errstate(over="ignore", invalid="ignore"):  # array_api_strict warns as numpy does
        while e:
            step = max(-_LARGEST_STEP, min(_LARGEST_STEP, e))
            a, e = a * 2.0**step, e - step
    return a


def _norm_of_other(a: AnyArray) -> float:
    """Return the Frobenius norm of an array of another library whose squares are in range, by blocks in float64."""
    xp, flat = namespace(a), reshape(detached(a), (-1,))
    parts = [flat[i : min(i + _BLOCK, flat.shape[0])] for i in range(0, flat.shape[0], _BLOCK)]
    wide = [astype(half, np.dtype(np.float64)) for part in parts for half in _real_parts(part)]
    return math.sqrt(float(xp.sum(xp.stack([xp.sum(half * half) for half in wide]))))


def distance(a: Array, b: Array) -> float:
    """Return norm(a - b) without holding the difference: one slab of the first leg at a time."""
    rows = max(1, _BLOCK * len(a) // max(1, a.size))
    parts = [norm(a[i : i + rows] - b[i : i + rows]) for i in range(0, len(a), rows)]
    return norm(np.array(parts))


class Prepared(NamedTuple):
    """A validated array whose squares stay in range: the argument is `array * 2**exponent`."""

    array: Array
    exponent: int
    norm: float


def prepare(function: str, parameter: str, x: Any, *, ndim: int | None = None) -> Prepared:
    """Validate `x`, and scale it exactly by a power of two where its squares could leave the range.

    Arrays of other libraries are read as numpy arrays: without a copy on the host, from a device with one.
    """
    if type(x) is not np.ndarray and is_other_array(x) and not hasattr(x, "resolve_conj"):
        x = to_host(x)
    a = np.ascontiguousarray(as_numbers(function, parameter, x, ndim=ndim))
    length = math.sqrt(squares(a))  # the only pass over a large array: NaN, inf and overflow all appear in the sum
    if not math.isfinite(length):
        refuse_infinite(function, parameter, a)
    if in_safe_range(length, a.size, a.dtype):
        return Prepared(a, 0, length)
    scaled, exponent = rescale(a)
    return Prepared(scaled, exponent, norm(scaled))
