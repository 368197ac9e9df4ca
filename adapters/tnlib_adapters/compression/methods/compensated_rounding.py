r"""Error-compensating rounding of a weight matrix to integers, in the metric of its inputs and output gradients.

With A = E[x x^T] of the inputs of a matrix W (m, n) and P = E[p p^T] of the gradients at its output, E = W - W' costs
(see `components`)

    tr(P E^T A E) = sum_ij a_i p_j F_ij^2,        F = L^T E M,

where A = L diag(a) L^T and P = M diag(p) M^T with unit lower triangular L and M. F_ij is E_ij plus a sum over entries
of E in later rows and columns. From the last entry to the first, W'_ij is rounded to the grid value nearest to W_ij
plus that sum, so that |F_ij| is at most half a step where the grid does not end: Babai's nearest plane algorithm for
the Kronecker product of both lattices. Without P it is GPTQ (Frantar et al., ICLR 2023), with both factors the rounding
of Tseng et al., YAQA (2025). Rows and columns are in ascending order of their moments, so that the largest are rounded
first.

Then single codes move to the minimum of the cost over their entry, all others fixed, in sweeps: coordinate descent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.kernels import kernel
from tnlib_adapters.compression.methods.components import multiply_rows
from tnlib_adapters.factors.integers import IntegerFormat, Integers, round_to_nearest
from tnlib_adapters.files.tensor_file import from_bf16, to_bf16

_DAMPED = (0.01, 0.1)  # multiples of the mean moment of inputs, and of gradients, added to all
_WIDENED = (1.0, 1.15)  # factors of the scales: compensated entries spread further than those of the matrix
_NO_STEP = 2.0**-100  # of groups of zeros, which have the value 0 alone; relative to the largest entry
_N_SWEEPS = 6  # of the descent; the cost of MiniLM's attention falls by 14 % in 2 bits, 10 % in 3 and 5 % in 4


def round_compensated(
    weight: Array,
    form: IntegerFormat,
    reads: Array | None = None,
    slopes: Array | None = None,
    *,
    descend: bool = True,
) -> Integers:
    """Return a matrix rounded so that errors of its entries compensate each other in its output.

    Its loss is never above that of rounding to nearest, where moments are those given, divided by their mean, plus
    0.01 (inputs) or 0.1 (gradients) of the identity.

    Parameters
    ----------
    weight
        (m, n), acting on rows.
    form
        Format of the integers, with groups along one axis.
    reads
        (m, m), second moments of the inputs; (m,) if they are diagonal, None for the identity: rows do not compensate
        each other.
    slopes
        (n, n), second moments of the gradient at the output; None for the identity.
    descend
        If False, leave out the coordinate descent and the choice among wider scales: four times faster.

    Returns
    -------
    Integers
        Codes (m, n) and their scales.

    Examples
    --------
    >>> weight = np.random.default_rng(0).standard_normal((8, 3))
    >>> reads = np.ones((8, 8)) + 0.1 * np.eye(8)  # inputs are nearly equal: sums over rows matter
    >>> form = IntegerFormat(2, axis=0)
    >>> nearest, compensated = round_to_nearest(weight, form), round_compensated(weight, form, reads)
    >>> rounding_loss(weight - compensated.values(), reads) < 0.1 * rounding_loss(weight - nearest.values(), reads)
    True
    """
    nearest = round_to_nearest(weight, form)
    size = float(np.abs(weight).max(initial=0.0)) or 1.0
    unit = weight.astype(np.float64) / size
    metric = [_damped(moments, share) for moments, share in zip((reads, slopes), _DAMPED, strict=True)]
    best, least = nearest, rounding_loss(unit - nearest.values(np.float64) / size, *metric)
    for factor in _WIDENED if descend and form.is_packed else (1.0,):
        scales = nearest.scales if factor == 1 else from_bf16(to_bf16(nearest.scales * np.float32(factor)))
        codes = _rounded(unit, scales.astype(np.float64) / size, form, metric, descend=descend)
        candidate = Integers(codes, scales, form)
        loss = rounding_loss(unit - candidate.values(np.float64) / size, *metric)
        if loss < least:
            best, least = candidate, loss
    return best


def rounding_loss(error: Array, reads: Array | None = None, slopes: Array | None = None) -> float:
    """Return tr(P E^T A E), the expected square of x E p.

    Parameters
    ----------
    error
        (m, n), E.
    reads
        (m, m), second moments A of the inputs x; (m,) if they are diagonal, None for the identity.
    slopes
        (n, n), second moments P of the gradient p at the output; None for the identity.

    Examples
    --------
    >>> rounding_loss(np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([1.0, 0.5]))
    3.0
    """
    left = error if reads is None else multiply_rows(reads, error)
    right = error if slopes is None else error @ slopes
    return float(np.vdot(left, right))


def _rounded(
    weight: Array, scales: Array, form: IntegerFormat, metric: Sequence[Array | None], *, descend: bool
) -> Array:
    """Return the codes; moments are not singular."""
    if weight.shape[1] > weight.shape[0]:  # the descent multiplies by the moments of columns for every entry
        (axis,) = form.axes
        turned = IntegerFormat(form.bits, 1 - axis, form.group)
        return np.ascontiguousarray(_rounded(weight.T, scales.T, turned, metric[::-1], descend=descend).T)
    metric = [a if a is not None and a.ndim == 2 else None for a in metric]  # diagonal: no errors are passed on
    orders, factors = zip(*(_factored(a, n) for a, n in zip(metric, weight.shape, strict=True)), strict=True)
    rows, columns = orders
    (axis,) = form.axes
    groups = [
        np.arange(n) // form.group if form.group and k == axis else np.arange(n) for k, n in enumerate(weight.shape)
    ]
    if not 0 < form.group < weight.shape[axis]:
        groups[axis] = np.zeros(weight.shape[axis], np.int64)
    scales = np.where(scales == 0, _NO_STEP, scales)
    step = np.ascontiguousarray(scales[np.ix_(groups[0], groups[1])][np.ix_(rows, columns)])
    low, high = form.code_range
    unit = np.ascontiguousarray(weight[np.ix_(rows, columns)])
    codes = np.zeros(weight.shape, np.int16)
    _nearest_plane(unit, step, factors[0], factors[1], form.centre, low, high, metric[0] is not None, codes)
    if descend:
        moments = [
            np.ones((1, 1)) if a is None else np.ascontiguousarray(a[np.ix_(order, order)])
            for a, order in zip(metric, orders, strict=True)
        ]
        _descend(unit, step, moments[0], moments[1], form.centre, low, high, _N_SWEEPS, codes)
    ordered = np.empty(weight.shape, np.uint8 if form.is_packed else np.int8)
    ordered[np.ix_(rows, columns)] = codes
    return ordered


def _damped(moments: Array | None, share: float) -> Array | None:
    """Return moments of mean 1 and without small eigenvalues."""
    if moments is None:
        return None
    n = len(moments)
    mean = float(moments.sum() if moments.ndim == 1 else np.trace(moments)) / n
    identity: Array = np.ones(n) if moments.ndim == 1 else np.eye(n)
    return identity if mean <= 0 else moments / mean + share * identity


def _factored(moments: Array | None, n: int) -> tuple[Array, Array]:
    """Return the order of the rows, and L^T of the moments in this order."""
    if moments is None:
        return np.arange(n), np.eye(1)
    order = np.argsort(np.diag(moments), kind="stable")
    lower = np.linalg.cholesky(moments[np.ix_(order, order)])
    return order, np.ascontiguousarray((lower / np.diag(lower)).T)


@kernel
def _nearest_plane(
    weight: Array,
    step: Array,
    rows: Array,
    columns: Array,
    centre: float,
    low: int,
    high: int,
    by_rows: bool,
    codes: Array,
) -> None:
    """Write the codes of a matrix (m, n), from the last row and column to the first.

    `rows` (m, m) and `columns` (n, n) are L^T and M^T, or (1, 1) for the identity.
    """
    m, n = weight.shape
    errors, mixed = np.zeros((m, n)), np.zeros(n)
    by_columns = len(columns) == n and n > 1
    for i in range(m - 1, -1, -1):
        for j in range(n):
            mixed[j] = weight[i, j]
        if by_rows:
            for k in range(i + 1, m):
                factor = rows[i, k]
                for j in range(n):
                    mixed[j] += factor * errors[k, j]
        for j in range(n - 1, -1, -1):
            value = mixed[j]
            if by_columns:
                for k in range(j + 1, n):
                    value += columns[j, k] * mixed[k]
            code = min(max(np.floor(value / step[i, j] + centre + 0.5), low), high)
            codes[i, j] = code
            rounded = step[i, j] * (code - centre)
            mixed[j] -= rounded  # row i of L^T E
            errors[i, j] = weight[i, j] - rounded


@kernel
def _descend(
    weight: Array,
    step: Array,
    reads: Array,
    slopes: Array,
    centre: float,
    low: int,
    high: int,
    n_sweeps: int,
    codes: Array,
) -> None:
    """Move single codes to the minimum of the cost, sweep by sweep; moments of (1, 1) are the identity."""
    m, n = weight.shape
    by_rows, by_columns = len(reads) == m and m > 1, len(slopes) == n and n > 1
    weighted = np.zeros((m, n))  # A E
    for i in range(m):
        for k in range(m):
            if by_rows or k == i:
                factor = reads[i, k] if by_rows else 1.0
                for j in range(n):
                    weighted[i, j] += factor * (weight[k, j] - step[k, j] * (codes[k, j] - centre))
    for _ in range(n_sweeps):
        n_moved = 0
        for i in range(m):
            for j in range(n):
                if by_columns:
                    gradient = 0.0
                    for k in range(n):
                        gradient += weighted[i, k] * slopes[j, k]
                else:
                    gradient = weighted[i, j]
                curvature = (reads[i, i] if by_rows else 1.0) * (slopes[j, j] if by_columns else 1.0)
                shift = gradient / (curvature * step[i, j])
                code = min(max(np.floor(codes[i, j] + shift + 0.5), low), high)
                if code != codes[i, j]:
                    change = step[i, j] * (code - codes[i, j])
                    codes[i, j] = code
                    n_moved += 1
                    if by_rows:
                        for k in range(m):
                            weighted[k, j] -= reads[k, i] * change
                    else:
                        weighted[i, j] -= change
        if n_moved == 0:
            break
