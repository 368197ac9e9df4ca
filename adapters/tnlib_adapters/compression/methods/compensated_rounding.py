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
Integer scales of super-blocks are refitted to the codes, and the codes to these: a scale d k of a group of rows g and
column j moves E by -d (change of k) v, where v are the codes of the group less that of 0; a minimum does the same with
v = -1. The least cost over one of them is at

    change of k  =  v^T (A E P)_gj / (d v^T A_gg v P_jj),

rounded to an integer. Groups follow each other, and tiles of columns in them: moved together, the columns of a matrix
whose gradients have one direction would all correct the same error.

Both work on tiles of the matrix. The sum over later tiles is a matrix product, and only the entries of one tile depend
on each other one by one, so that nearly all operations are those of matrix products in single precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.kernels import kernel
from tnlib_adapters.compression.methods.components import damped, rounding_loss
from tnlib_adapters.factors.integers import SUPER_BLOCK, IntegerFormat, Integers, integer_scales
from tnlib_adapters.factors.rounding import round_to_nearest

_DAMPED = (0.01, 0.1)  # multiples of the mean moment of inputs, and of gradients, added to all
_WIDENED = (1.0, 1.15)  # factors of the scales: compensated entries spread further than those of the matrix
_NO_STEP = 2.0**-100  # of groups of zeros, which have the value 0 alone; relative to the largest entry
_N_SWEEPS = 4  # of the descent; on MiniLM's attention six lower the cost by 14 % in 2 bits, 10 % in 3 and 5 % in 4
_FEW_MOVES = 0.002  # of all codes in a sweep: the next one would change the cost by less than 0.1 %
_TILE = 64  # rows or columns: entries one by one take as long as the matrix products between tiles
_LONG_TILE = 2048  # of a side without moments
_SLAB = 2**22  # numbers rounded at once where a side has no moments; intermediate arrays take 25 bytes for each
_MOVED = 16  # columns whose integer scales move together
_NONE: Array = np.ones((1, 1), np.float32)

_Metric = Sequence[Array | None]  # moments of inputs and of gradients, divided by their mean and damped


def round_compensated(
    weight: Array,
    form: IntegerFormat,
    reads: Array | None = None,
    slopes: Array | None = None,
    *,
    descend: bool = True,
) -> Integers:
    """Return a matrix (m, n), acting on rows, rounded so that errors of entries compensate each other in its output.

    `form` has groups along one axis. `reads` (m, m) are second moments of the inputs, (m,) if they are diagonal, and
    `slopes` (n, n) those of the gradient at the output; None is the identity: rows, or columns, do not compensate each
    other. The loss is never above that of rounding to nearest, where moments are those given, divided by their mean,
    plus 0.01 (inputs) or 0.1 (gradients) of the identity. Without `descend` there is no coordinate descent and no
    choice among wider scales: four times faster.

    >>> weight = np.random.default_rng(0).standard_normal((8, 3))
    >>> reads = np.ones((8, 8)) + 0.1 * np.eye(8)  # of nearly equal inputs
    >>> form = IntegerFormat(2, axis=0)
    >>> rounded = round_to_nearest(weight, form), round_compensated(weight, form, reads)
    >>> errors = (weight - each.values() for each in rounded)
    >>> nearest, compensated = (rounding_loss(error, reads) for error in errors)
    >>> compensated < 0.1 * nearest
    True
    """
    metric = [_unit_metric(moments, share) for moments, share in zip((reads, slopes), _DAMPED, strict=True)]
    for axis, moments in enumerate(metric):
        if weight.size > _SLAB and axis not in form.axes and (moments is None or moments.ndim == 1):
            return _round_slabs(weight, form, metric, axis, descend=descend)
    return _round(weight, form, metric, descend=descend)


def _round_slabs(weight: Array, form: IntegerFormat, metric: _Metric, axis: int, *, descend: bool) -> Integers:
    """Return the rounded matrix, slab by slab along an axis whose entries do not compensate each other."""
    length, rounded = max(1, _SLAB // weight.shape[1 - axis]), list[Integers]()
    sides, moments = list(metric), metric[axis]
    for start in range(0, weight.shape[axis], length):
        slab = slice(start, start + length)
        sides[axis] = None if moments is None else moments[slab]
        rounded.append(_round(weight[slab] if axis == 0 else weight[:, slab], form, sides, descend=descend))
    codes, scales = (np.concatenate([getattr(part, of) for part in rounded], axis) for of in ("codes", "scales"))
    return Integers(codes, scales, form)


def _round(weight: Array, form: IntegerFormat, metric: _Metric, *, descend: bool) -> Integers:
    """Return the rounded matrix, all of it at once."""
    nearest = round_to_nearest(weight, form)
    size = float(np.abs(weight).max(initial=0.0)) or 1.0
    unit = (weight / size).astype(np.float32)
    rows, columns = (_Side.of(moments, n) for moments, n in zip(metric, weight.shape, strict=True))

    def loss_of(integers: Integers) -> float:
        return rounding_loss(unit - integers.values() / np.float32(size), *metric)

    ordered = unit[np.ix_(rows.order, columns.order)]
    best, least = nearest, loss_of(nearest)
    for factor in _WIDENED if descend and form.is_packed else (1.0,):
        scales = nearest.scales if factor == 1 else form.stored_scales(form.widened(nearest.scales, factor))
        grid = _StepSizes.of(scales / size, form, rows, columns)
        codes, loss = _nearest_plane(ordered, grid, rows, columns)
        if loss < least:
            best, least = Integers(_reordered(codes, grid), scales, form), loss

    def descended(integers: Integers) -> Integers:
        grid = _StepSizes.of(integers.scales / size, form, rows, columns)
        codes = integers.codes[np.ix_(*grid.orders)].astype(np.int16)
        _descend(ordered, grid, rows, columns, codes)
        return Integers(_reordered(codes, grid), integers.scales, form)

    best = descended(best) if descend else best
    if descend and form.in_super_blocks:
        refitted = refit_scales(weight.astype(np.float32), best, *metric)
        best = descended(refitted) if loss_of(refitted) < loss_of(best) else best
    return best


def _reordered(codes: Array, grid: _StepSizes) -> Array:
    """Return the codes in the order of the matrix."""
    ordered = np.empty(codes.shape, np.uint8 if grid.form.is_packed else np.int8)
    ordered[np.ix_(*grid.orders)] = codes
    return ordered


def _unit_metric(moments: Array | None, share: float) -> Array | None:
    """Return moments of mean 1, damped by `share`, in single precision; the identity for moments of 0."""
    if moments is None:
        return None
    mean = float(moments.mean() if moments.ndim == 1 else np.trace(moments) / len(moments))
    if mean <= 0:
        return np.ones(len(moments), np.float32) if moments.ndim == 1 else np.eye(len(moments), dtype=np.float32)
    return damped((moments / mean).astype(np.float32), share)


@dataclass(frozen=True)
class _Side:
    """Moments of the rows or columns of a matrix, in the order of their diagonal, and their unit triangular factor.

    There are none if the moments are diagonal: then no errors are passed on from one row to another.
    """

    order: Array  # n
    variances: Array  # n, those of moments = L diag(variances) L^T
    moments: Array | None = None  # n n
    lower: Array | None = None  # n n, L

    @classmethod
    def of(cls, moments: Array | None, n: int) -> _Side:
        if moments is None or moments.ndim == 1 or n == 1:
            return cls(np.arange(n), np.ones(n, np.float32) if moments is None else moments.reshape(n))
        order = np.argsort(np.diag(moments), kind="stable")
        ordered = moments[np.ix_(order, order)]
        lower = np.linalg.cholesky(ordered)
        roots = np.diag(lower)
        return cls(order, roots**2, ordered, lower / roots)

    def tiles(self) -> list[slice]:
        """Return the parts that are rounded one after the other, last to first; independent without moments."""
        n, size = len(self.order), _LONG_TILE if self.moments is None else _TILE
        return [slice(start, min(start + size, n)) for start in range(0, n, size)][::-1]


@dataclass(frozen=True)
class _StepSizes:
    """Step of every entry of a matrix whose rows and columns are reordered, and its code of 0."""

    of_groups: tuple[Array, Array]  # with the other axis in order
    groups: Array  # group of every entry along the axis, in order
    form: IntegerFormat
    orders: tuple[Array, Array]

    @classmethod
    def of(cls, scales: Array, form: IntegerFormat, rows: _Side, columns: _Side) -> _StepSizes:
        (axis,), orders = form.axes, (rows.order, columns.order)
        scales, *minima = np.split(scales, 1 + form.has_minimum, axis)
        steps = np.where(scales == 0, _NO_STEP, scales).astype(np.float32)
        centres = (minima[0] / steps).astype(np.float32) if minima else np.full_like(steps, form.centre)
        groups = orders[axis] // form.group if steps.shape[axis] > 1 else np.zeros_like(orders[axis])
        steps, centres = (np.take(of_groups, orders[1 - axis], 1 - axis) for of_groups in (steps, centres))
        return cls((steps, centres), groups, form, orders)

    def tile(self, rows: slice, columns: slice) -> tuple[Array, Array]:
        """Return steps and codes of 0 of the entries of a tile."""
        if self.form.axes == (0,):
            steps, centres = (np.take(of_groups[:, columns], self.groups[rows], 0) for of_groups in self.of_groups)
        else:
            steps, centres = (np.take(of_groups[rows], self.groups[columns], 1) for of_groups in self.of_groups)
        return steps, centres


def _nearest_plane(weight: Array, grid: _StepSizes, rows: _Side, columns: _Side) -> tuple[Array, float]:
    """Return the codes (m, n), rounded from the last tile to the first, and their loss."""
    errors, loss = np.zeros_like(weight), 0.0  # E
    codes = np.zeros(weight.shape, np.int16)
    for i in rows.tiles():
        later = slice(i.stop, None)
        base = weight[i] if rows.lower is None else weight[i] + rows.lower[later, i].T @ errors[later]  # i n [later]
        mixed, rests = np.zeros_like(base), np.zeros_like(base)  # rows i of L^T E, and of F
        for j in columns.tiles():
            after = slice(j.stop, None)
            shift = np.zeros_like(base[:, j]) if columns.lower is None else mixed[:, after] @ columns.lower[after, j]
            _round_tile(
                weight[i, j],
                base[:, j],
                shift,
                grid.tile(i, j),
                (
                    _NONE if rows.lower is None else np.ascontiguousarray(rows.lower[i, i].T),
                    _NONE if columns.lower is None else np.ascontiguousarray(columns.lower[j, j]),
                ),
                grid.form.code_range,
                (codes[i, j], errors[i, j], mixed[:, j], rests[:, j]),
            )
        loss += float(rows.variances[i] @ np.square(rests, out=rests) @ columns.variances)
    return codes, loss


def _descend(weight: Array, grid: _StepSizes, rows: _Side, columns: _Side, codes: Array) -> None:
    """Move single codes to the minimum of the cost, tile by tile, in sweeps."""
    form = grid.form
    weighted = np.empty_like(weight)  # E, then A E
    for i in rows.tiles():
        steps, centres = grid.tile(i, slice(None))
        weighted[i] = weight[i] - steps * (codes[i] - centres)
    if rows.moments is not None:
        weighted = rows.moments @ weighted
    for _ in range(_N_SWEEPS):
        n_moved = 0
        for i in rows.tiles()[::-1]:
            for j in columns.tiles()[::-1]:
                gradient = weighted[i, j].copy() if columns.moments is None else weighted[i] @ columns.moments[:, j]
                changes = np.zeros_like(gradient)
                _descend_tile(
                    gradient,
                    grid.tile(i, j)[0],
                    _NONE if rows.moments is None else np.ascontiguousarray(rows.moments[i, i]),
                    _NONE if columns.moments is None else np.ascontiguousarray(columns.moments[j, j]),
                    form.code_range,
                    codes[i, j],
                    changes,
                )
                n_moved += int(np.count_nonzero(changes))
                if rows.moments is None:
                    weighted[i, j] -= changes
                else:
                    weighted[:, j] -= rows.moments[:, i] @ changes  # m j [i]
        if n_moved <= _FEW_MOVES * codes.size:
            break


def refit_scales(weight: Array, integers: Integers, reads: Array | None, slopes: Array | None) -> Integers:
    """Return rounded values of a matrix (m, n) whose integer scales and minima moved once, with the same codes.

    Moments of inputs, `reads`, and of gradients, `slopes`, are those of `round_compensated`. The caller compares the
    losses: columns that move together may raise it.

    >>> weight = np.random.default_rng(0).standard_normal((256, 4)).astype(np.float32)
    >>> form = IntegerFormat(3, 0, 16, has_zero=True, scale_bits=6)
    >>> rounded = round_to_nearest(weight, form)
    >>> refitted = refit_scales(weight, rounded, None, None)
    >>> before, after = weight - rounded.values(), weight - refitted.values()
    >>> bool(np.square(after).sum() < np.square(before).sum())
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
    width, of_groups, scales = n if slopes is None else _MOVED, SUPER_BLOCK // form.group, list[Array]()
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


@kernel
def _round_tile(
    weight: Array,
    base: Array,
    shift: Array,
    grid: tuple[Array, Array],
    triangles: tuple[Array, Array],
    code_range: tuple[int, int],
    out: tuple[Array, Array, Array, Array],
) -> None:
    """Write codes, errors E, rows of L^T E and F of a tile (p, q), from the last entry to the first.

    `base` is the weight plus the errors of rows of later tiles, `shift` the sum over columns of later tiles.
    `grid` are steps and codes of 0. `triangles` are tiles of L^T (p, p) and of M (q, q); (1, 1) if no errors are
    passed on.
    """
    upper, lower = triangles
    step, centres = grid
    low, high = code_range
    codes, errors, mixed, rests = out
    p, q = weight.shape
    by_rows, by_columns = len(upper) == p and p > 1, len(lower) == q and q > 1
    current, value, passed = np.empty(q, np.float32), np.empty(q, np.float32), np.empty((p, q), np.float32)
    for i in range(p - 1, -1, -1):
        for j in range(q):
            current[j] = base[i, j]
        if by_rows:
            for k in range(i + 1, p):
                factor = upper[i, k]
                for j in range(q):
                    current[j] += factor * passed[k, j]
        for j in range(q):
            value[j] = current[j] + shift[i, j]
        for j in range(q - 1, -1, -1):
            centre = np.float64(centres[i, j])
            code = min(max(np.floor(value[j] / step[i, j] + centre + 0.5), low), high)
            rounded = step[i, j] * np.float32(code - centre)
            codes[i, j] = code
            errors[i, j] = passed[i, j] = weight[i, j] - rounded
            rests[i, j] = value[j] - rounded
            rest = current[j] - rounded
            mixed[i, j] = rest
            if by_columns:
                for k in range(j):
                    value[k] += lower[j, k] * rest


@kernel
def _descend_tile(
    gradient: Array,
    step: Array,
    reads: Array,
    slopes: Array,
    code_range: tuple[int, int],
    codes: Array,
    changes: Array,
) -> None:
    """Move codes of a tile (p, q) to the minimum of the cost, and write the changes of the values.

    `gradient` is that of half the cost; moments of (1, 1) are the identity.
    """
    low, high = code_range
    p, q = gradient.shape
    by_rows, by_columns = len(reads) == p and p > 1, len(slopes) == q and q > 1
    for i in range(p):
        for j in range(q):
            curvature = (reads[i, i] if by_rows else np.float32(1)) * (slopes[j, j] if by_columns else np.float32(1))
            moved = np.floor(codes[i, j] + gradient[i, j] / (curvature * step[i, j]) + 0.5)
            code = min(max(moved, low), high)
            if code == codes[i, j]:
                continue
            change = step[i, j] * np.float32(code - codes[i, j])
            codes[i, j] = code
            changes[i, j] += change
            for k in range(p if by_rows else 1):
                row = k if by_rows else i
                factor = change * (reads[k, i] if by_rows else np.float32(1))
                if by_columns:
                    for l in range(q):
                        gradient[row, l] -= factor * slopes[j, l]
                else:
                    gradient[row, j] -= factor
