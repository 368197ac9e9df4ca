"""Rounding of an array to the nearest values of a format of integers, with scales that clip its largest entries."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.factors.integers import IntegerFormat, Integers

_LOWEST_CLIP = {2: 0.35, 3: 0.5, 4: 0.6, 5: 0.7, 6: 0.75}  # of the largest modulus, by bits
_N_CLIPS = 16
_BLOCK = 2**16  # numbers rounded at once, so that intermediate arrays stay in the cache


def round_to_nearest(a: Array, format: IntegerFormat, *, search: bool = True) -> Integers:
    """Return a real array rounded to the nearest values of a format; a group of zeros has the scale 0, or 1 in 8 bits.

    With `search`, the scale of a group has the smallest squared error among 16 that clip its largest entries more or
    less; in 8 bits none is clipped.

    >>> a = np.array([0.9, -0.3, 0.2, -1.0], np.float32)
    >>> round_to_nearest(a, IntegerFormat(2, axis=0)).codes.tolist()
    [3, 1, 2, 0]
    """
    if not format.is_packed:
        return _round_symmetric(a, format)
    (axis,) = format.axes
    rows = np.moveaxis(a, axis, -1)
    sizes = format.group_sizes(rows.shape[-1])
    codes = np.zeros(rows.shape, np.uint8)
    scales = np.zeros((*rows.shape[:-1], len(sizes)), np.float32)
    factors = np.linspace(1.0, _LOWEST_CLIP[format.bits], _N_CLIPS) if search else np.ones(1)
    if format.has_zero:
        factors = np.concatenate([factors, -factors])
    if format.scale_bits:
        return _round_with_stored_scales(rows, format, factors)
    n_equal = sizes.count(sizes[0])  # the last group may be shorter
    for first, last in ((0, n_equal), (n_equal, len(sizes))):
        if first < last and sizes[first] > 0:
            numbers = slice(first * sizes[0], first * sizes[0] + (last - first) * sizes[first])
            groups = rows[..., numbers].reshape(-1, sizes[first])
            own_codes, own_scales = np.empty(groups.shape, np.uint8), np.empty(len(groups), np.float32)
            for block in _blocks(groups.shape):
                own_codes[block], own_scales[block] = _round_groups(groups[block], format, factors)
            codes[..., numbers] = own_codes.reshape(rows[..., numbers].shape)
            scales[..., first:last] = own_scales.reshape(*rows.shape[:-1], last - first)
    return Integers(np.moveaxis(codes, -1, axis), np.moveaxis(scales, -1, axis), format)


def _round_with_stored_scales(rows: Array, format: IntegerFormat, factors: Array) -> Integers:
    """Return an array whose last axis is that of the format in the codes nearest to it for the stored scales."""
    (axis,), top, n_groups = format.axes, format.code_range[1], rows.shape[-1] // format.group
    groups = np.ascontiguousarray(rows, np.float32).reshape(-1, format.group)
    scales, codes = np.empty((1 + format.has_minimum, len(groups)), np.float32), np.empty(groups.shape, np.uint8)
    for block in _blocks(groups.shape):
        own = groups[block]
        scales[:, block] = (
            _affine_scales(own, top, factors) if format.has_minimum else _round_groups(own, format, factors)[1:]
        )
    of_rows = np.concatenate([part.reshape(*rows.shape[:-1], n_groups) for part in scales], axis=-1)
    stored = format.stored_scales(np.moveaxis(of_rows, -1, axis))
    scale, *minima = (part.ravel() for part in np.split(np.moveaxis(stored, axis, -1), len(scales), axis=-1))
    for block in _blocks(groups.shape):
        own, step = groups[block], scale[block]
        codes[block] = _affine_codes(own, step, minima[0][block], top) if minima else _nearest(own, step, format)
    return Integers(np.moveaxis(codes.reshape(rows.shape), -1, axis), stored, format)


def _affine_scales(groups: Array, top: int, factors: Array) -> tuple[Array, Array]:
    """Return scales and minima (n,) with the least squared error of groups (n, size) in codes from 0 to `top`.

    Values are scale * code - minimum, neither negative. For every factor of the range, the codes of the narrower range
    get the scale and minimum of least squares.

    >>> group = np.array([[-1.0, 0.0, 1.0, 2.0]], np.float32)
    >>> [part.tolist() for part in _affine_scales(group, 3, np.ones(1))]
    [[1.0], [1.0]]
    """
    low, high = (np.minimum(groups.min(axis=1), 0), np.maximum(groups.max(axis=1), 0))
    best, least = (np.zeros_like(low), np.zeros_like(low)), np.full(len(groups), np.inf, np.float32)
    for factor in factors.astype(np.float32):
        scale = factor * (high - low) / top
        minimum = np.maximum((scale * top - high - low) / 2, 0)
        q = _affine_codes(groups, scale, minimum, top)
        mean_q, mean = q.mean(axis=1), groups.mean(axis=1)
        centred = q - mean_q[:, None]
        variance = np.einsum("ij,ij->i", centred, centred)
        scale = np.einsum("ij,ij->i", centred, groups) / np.where(variance == 0, np.float32(1), variance)
        minimum = scale * mean_q - mean
        through_0 = np.einsum("ij,ij->i", q, groups) / np.maximum(np.einsum("ij,ij->i", q, q), np.float32(1))
        scale = np.maximum(np.where(minimum < 0, through_0, scale), 0)
        minimum = np.maximum(minimum, 0)
        error = scale[:, None] * _affine_codes(groups, scale, minimum, top) - minimum[:, None] - groups
        loss = np.einsum("ij,ij->i", error, error)
        better = loss < least
        for kept, part in zip((*best, least), (scale, minimum, loss), strict=True):
            kept[better] = part[better]
    return best


def _affine_codes(groups: Array, scale: Array, minimum: Array, top: int) -> Array:
    """Return the codes of groups (n, size), as floats, with scales and minima (n,).

    >>> _affine_codes(np.array([[-1.0, 0.4, 9.0]]), np.ones(1), np.ones(1), 3).tolist()
    [[0.0, 1.0, 3.0]]
    """
    codes: Array = np.rint((groups + minimum[:, None]) / np.where(scale == 0, 1, scale).astype(groups.dtype)[:, None])
    return np.clip(codes, 0, top, out=codes)


def _round_groups(groups: Array, format: IntegerFormat, factors: Array) -> tuple[Array, Array]:
    """Return the codes of groups (n, size) and their scales (n,), the best of those that clip at these factors."""
    top = np.abs(groups).max(axis=1)
    exponents = np.frexp(top)[1]
    # in units of a power of two, so that no square overflows or underflows
    unit, top = np.ldexp(groups, -exponents[:, None]).astype(np.float32), np.ldexp(top, -exponents)
    best, least = np.zeros(len(groups), np.float32), np.full(len(groups), np.inf, np.float32)
    for factor in factors:
        scale = (top * (factor / format.centre)).astype(np.float32)
        scale = scale if format.scale_bits else format.stored_scales(scale)  # codes follow the rounded scale
        difference = _nearest(unit, scale, format)
        difference -= np.float32(format.centre)
        difference *= scale[:, None]
        difference -= unit
        error = np.einsum("ij,ij->i", difference, difference)
        better = error < least
        best[better], least[better] = scale[better], error[better]
    codes = _nearest(unit, best, format).astype(np.uint8)
    with np.errstate(over="ignore", under="ignore"):  # beyond float32: refused by name when they are written
        scales = np.ldexp(best, exponents)
        return codes, scales if format.scale_bits else format.stored_scales(scales)


def _nearest(unit: Array, scale: Array, format: IntegerFormat) -> Array:
    q = unit / np.where(scale == 0, np.float32(1), scale)[:, None]
    q += np.float32(format.centre)
    np.rint(q, out=q)
    return np.clip(q, 0, 2**format.bits - 1, out=q)


def _round_symmetric(a: Array, format: IntegerFormat) -> Integers:
    """Return an array in 8 bits, without clipping."""
    axes = format.axes
    sizes = format.group_sizes(a.shape[axes[0]])
    if len(sizes) == 1:
        return Integers(*_symmetric(a, axes, format), format)
    ends = np.cumsum(sizes)[:-1]
    parts = [_symmetric(part, axes, format) for part in np.split(a, ends, axes[0])]
    codes, scales = (np.concatenate(arrays, axes[0]) for arrays in zip(*parts, strict=True))
    return Integers(codes, scales, format)


def _symmetric(a: Array, axes: tuple[int, ...], format: IntegerFormat) -> tuple[Array, Array]:
    """Return integers from -127 to 127, and float32 scales shared along these axes, as the format stores them."""
    ends = np.max(a, axis=axes, keepdims=True, initial=0.0), np.min(a, axis=axes, keepdims=True, initial=0.0)
    scale = (np.maximum(ends[0], -ends[1]) / 127).astype(np.float32)
    scale[scale == 0] = 1.0
    scale = format.stored_scales(scale)
    codes = np.empty(a.shape, np.int8)
    for rows in _blocks((len(a), math.prod(a.shape[1:]))):  # quotients take eight times the memory of codes
        of_rows = scale[rows] if len(scale) > 1 else scale
        codes[rows] = np.clip(np.rint(a[rows] / of_rows.astype(np.float64)), -127, 127)
    return codes, scale


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, shape[1]))
    return (slice(first, first + step) for first in range(0, shape[0], step))
