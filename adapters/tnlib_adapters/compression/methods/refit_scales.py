r"""Integer scales and minima of super-blocks refitted to the rounded codes, in the metric of inputs and gradients.

A scale d k of a group of rows g and column j moves the error E by -d (change of k) v, where v are the codes of the
group less that of 0; a minimum does the same with v = -1. The least cost tr(P E^T A E) over one of them is at

    change of k  =  v^T (A E P)_gj / (d v^T A_gg v P_jj),

rounded to an integer. Groups follow each other, and tiles of columns in them: moved together, the columns of a matrix
whose gradients have one direction would all correct the same error.
"""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.factors.integers import Integers
from tnlib_adapters.factors.super_blocks import SIZE, integer_scales

_COLUMNS = 16  # moved together


def refit_scales(weight: Array, integers: Integers, reads: Array | None, slopes: Array | None) -> Integers:
    """Return rounded values of a matrix (m, n) whose integer scales and minima moved once, with the same codes.

    Moments of inputs, `reads`, and of gradients, `slopes`, are those of `round_compensated`. The caller compares the
    losses: columns that move together may raise it.

    >>> weight = np.random.default_rng(0).standard_normal((256, 4)).astype(np.float32)
    >>> from tnlib_adapters.factors.integers import IntegerFormat
    >>> from tnlib_adapters.factors.rounding import round_to_nearest
    >>> form = IntegerFormat(3, 0, 16, has_zero=True, scale_bits=6)
    >>> rounded = round_to_nearest(weight, form)
    >>> refitted = refit_scales(weight, rounded, None, None)
    >>> bool(np.square(weight - refitted.values()).sum() < np.square(weight - rounded.values()).sum())
    True
    """
    if integers.format.axes == (1,):
        return refit_scales(weight.T, integers.transposed(), slopes, reads).transposed()
    form, (m, n) = integers.format, weight.shape
    if reads is None or reads.ndim == 1:
        reads = np.diag(np.ones(m, np.float32) if reads is None else reads)
    slopes = None if slopes is None or slopes.ndim == 1 else slopes  # a factor of a column does not move its minimum
    gradients = reads @ (weight - integers.values())  # A E P
    gradients = gradients if slopes is None else gradients @ slopes
    diagonal = np.ones(n, np.float32) if slopes is None else np.diag(slopes)
    width, of_groups, scales = n if slopes is None else _COLUMNS, SIZE // form.group, list[Array]()
    limit = 2 ** (form.scale_bits - (not form.has_minimum)) - 1
    for is_minimum, part in enumerate(np.split(integers.scales, 1 + form.has_minimum)):
        blocks = np.ascontiguousarray(part.T).reshape(-1, of_groups)
        unit, integer = integer_scales(blocks, form.scale_bits, signed=not form.has_minimum)
        units, k = (a.reshape(n, -1).T.copy() for a in (np.repeat(unit, of_groups, axis=1), integer))
        for g in range(m // form.group):
            rows = slice(g * form.group, (g + 1) * form.group)
            v = (
                np.full((form.group, n), -1, np.float32)
                if is_minimum
                else integers.codes[rows] - np.float32(form.centre)
            )
            weighted = reads[rows, rows] @ v
            curvature = units[g] * diagonal * np.einsum("ij,ij->j", v, weighted)
            inverse = np.divide(1, curvature, out=np.zeros_like(curvature), where=curvature != 0)
            own, steps = gradients[rows].copy(), np.zeros(n, np.float32)
            for j in (slice(start, start + width) for start in range(0, n, width)):
                moved = np.rint(k[g, j] + inverse[j] * np.einsum("ij,ij->j", v[:, j], own[:, j]))
                moved = np.clip(moved, 0 if form.has_minimum else -limit, limit)
                steps[j], k[g, j] = units[g, j] * (moved - k[g, j]), moved
                if slopes is not None and steps[j].any():
                    own[:, j.stop :] -= (weighted[:, j] * steps[j]) @ slopes[j, j.stop :]
            change = v * steps
            gradients -= reads[:, rows] @ (change if slopes is None else change @ slopes)
        scales.append(units * k)
    return Integers(integers.codes, np.concatenate(scales), form)
