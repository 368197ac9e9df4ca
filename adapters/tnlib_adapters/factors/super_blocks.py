r"""Scales of super-blocks: integers in units of one float16 for 256 numbers, as K-quants of llama.cpp store them.

A group g of 16 or 32 numbers has the scale s_g = d k_g with an integer k_g of 4 to 8 bits and a float16 d, which the
groups of 256 numbers share. Types without a zero point in the middle of their codes also have a minimum,

    value  =  d k_g code - e m_g,        0 <= k_g, m_g < 2^n_bits,

and those with one have scales of either sign, |k_g| < 2^(n_bits - 1). The products d k_g are exact in float32.
"""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array

SIZE = 256  # numbers that share a unit


def integer_scales(scales: Array, n_bits: int, *, signed: bool) -> tuple[Array, Array]:
    """Return units (n, 1) and integers (n, k), in float32, whose products are nearest to the scales (n, k) of n blocks.

    The unit has the least squared error among the largest scale divided by every integer, so that products of a unit
    and integers return as they are.

    >>> unit, integers = integer_scales(np.array([[0.5, 1.5, 7.5]], np.float32), 4, signed=False)
    >>> unit.tolist(), integers.tolist()
    ([[0.5]], [[1.0, 3.0, 15.0]])
    """
    limit = 2 ** (n_bits - signed) - 1
    top = np.abs(scales).max(axis=1, keepdims=True)
    least = np.full(len(scales), np.inf, np.float32)
    units, integers = np.zeros_like(top), np.zeros_like(scales)
    for k in range(limit, 0, -1):
        unit = (top / np.float32(k)).astype(np.float16).astype(np.float32)
        rounded = np.clip(np.rint(scales / np.where(unit == 0, np.float32(1), unit)), -limit * signed, limit)
        error = np.square(scales - unit * rounded).sum(axis=1)
        better = error < least
        units[better], integers[better], least[better] = unit[better], rounded[better], error[better]
    return units, integers


def affine_scales(groups: Array, top: int, factors: Array) -> tuple[Array, Array]:
    """Return scales and minima (n,) with the least squared error of groups (n, size) in codes from 0 to `top`.

    Values are scale * code - minimum, neither negative. For every factor of the range, the codes of the narrower range
    get the scale and minimum of least squares.

    >>> [part.tolist() for part in affine_scales(np.array([[-1.0, 0.0, 1.0, 2.0]], np.float32), 3, np.ones(1))]
    [[1.0], [1.0]]
    """
    low, high = (np.minimum(groups.min(axis=1), 0), np.maximum(groups.max(axis=1), 0))
    best, least = (np.zeros_like(low), np.zeros_like(low)), np.full(len(groups), np.inf, np.float32)
    for factor in factors.astype(np.float32):
        scale = factor * (high - low) / top
        minimum = np.maximum((scale * top - high - low) / 2, 0)
        q = affine_codes(groups, scale, minimum, top)
        mean_q, mean = q.mean(axis=1), groups.mean(axis=1)
        centred = q - mean_q[:, None]
        variance = np.einsum("ij,ij->i", centred, centred)
        scale = np.einsum("ij,ij->i", centred, groups) / np.where(variance == 0, np.float32(1), variance)
        minimum = scale * mean_q - mean
        through_0 = np.einsum("ij,ij->i", q, groups) / np.maximum(np.einsum("ij,ij->i", q, q), np.float32(1))
        scale = np.maximum(np.where(minimum < 0, through_0, scale), 0)
        minimum = np.maximum(minimum, 0)
        error = scale[:, None] * affine_codes(groups, scale, minimum, top) - minimum[:, None] - groups
        loss = np.einsum("ij,ij->i", error, error)
        better = loss < least
        for kept, part in zip((*best, least), (scale, minimum, loss), strict=True):
            kept[better] = part[better]
    return best


def affine_codes(groups: Array, scale: Array, minimum: Array, top: int) -> Array:
    """Return the codes of groups (n, size), as floats, with scales and minima (n,).

    >>> affine_codes(np.array([[-1.0, 0.4, 9.0]]), np.array([1.0]), np.array([1.0]), 3).tolist()
    [[0.0, 1.0, 3.0]]
    """
    codes: Array = np.rint((groups + minimum[:, None]) / np.where(scale == 0, 1, scale).astype(groups.dtype)[:, None])
    return np.clip(codes, 0, top, out=codes)
