r"""TT-SVD of an array that exceeds memory.

In passes, an array of low ranks is cut in the middle, as in memory: a sample of rows gives a few orthonormal rows V
that nearly span the row space of A, and two passes compute

    C = A V^H,        P = E^H A  with the isometry E of the train of C,

of which C and P fit in memory. The error of the cut is norm(A)^2 - norm(P)^2, or is measured in a third pass.

Any other array is split from the left. In one pass the Gram matrix of the first legs, or their triangular factor, gives
their cores; a second pass projects the array onto them. Both are repeated with the projected array until it fits.

In one read, a sketch of the matrix of about half of the legs gives A ~ C V with orthonormal rows V
(`out_of_core/matrix_sketch.py`). The cores of the left half are those of C. With their isometry E, the cores of the
right half are those of E^H C V: the TT-SVD of C V, whose truncations add up to the error of the sketch.

D. Kressner, B. Vandereycken, R. Voorhaar, "Streaming tensor train approximation", SIAM J. Sci. Comput. 45 (2023),
sketch every bond; here one sketch of the middle bond is enough, as both halves fit in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array, Caps, MaxRank
from tnlib.formats.train.canonicalize import move_center
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.leg_splitting import ROWS, isometries, merge_cores, split_legs
from tnlib.linalg.canonical_basis import leading_phases
from tnlib.linalg.gram_svd import LeftSVD
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.array_source import ArraySource
from tnlib.out_of_core.dask_source import DaskSource
from tnlib.out_of_core.leg_truncation import LegSVD, first_svd, project_truncated
from tnlib.out_of_core.matrix_sketch import SketchedError, SketchedMatrix, require_rank
from tnlib.out_of_core.one_read import OneRead
from tnlib.out_of_core.passes import Passes
from tnlib.out_of_core.row_space import project_columns, sampled_row_space, times_rows
from tnlib.out_of_core.tiles import joined_size

_SMALLEST_SAVING = 0.9  # of the array that a projection may leave
_COLUMN_COST = 8  # every tile adds to all sums over columns, but to its own rows only


def decompose_stored(
    opened: Passes | OneRead, rtol: float | None, max_rank: MaxRank
) -> tuple[TensorTrain, TruncationBudget | SketchedError]:
    """Return the left-canonical train of an array that is read by tiles, and its error."""
    if isinstance(opened, OneRead):
        return _decompose_in_one_read(opened, rtol, max_rank)
    with opened as passes:
        return _decompose_source(passes, passes.source, [(k,) for k in range(len(passes.source.shape))], rtol, max_rank)


def decompose_stored_matrix(
    opened: Passes, rows: Sequence[int], columns: Sequence[int], rtol: float | None, max_rank: MaxRank
) -> tuple[TensorTrain, TruncationBudget]:
    """Return the train of a matrix over the paired legs (rows[k], columns[k]), and its error."""
    with opened as passes:
        legs = [(2 * k, 2 * k + 1) for k in range(len(rows))]
        return _decompose_source(passes, passes.source.paired(rows, columns), legs, rtol, max_rank)


def _decompose_source(
    passes: Passes, source: ArraySource, legs: Sequence[Sequence[int]], rtol: float | None, max_rank: MaxRank
) -> tuple[TensorTrain, TruncationBudget]:
    """Return the left-canonical train of a source and its truncations; leg k is that of the axes `legs[k]`."""
    sizes = [math.prod(source.shape[a] for a in axes) for axes in legs]
    sides = [min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes))]
    budget = TruncationBudget(1.0, rtol, sides, source.dtype, max_rank)  # the norm is known after the first pass
    cores = _split_in_the_middle(passes, source, legs, budget)
    if cores is None:
        source.exponent = 0  # that of a sample need not suit the whole
        largest = passes.limit.largest_gram(source.dtype)
        joins_less = joined_size(source, legs[-1]) < joined_size(source, legs[0])
        if isinstance(source, DaskSource) and joins_less and sizes[-1] <= largest:
            cores = _split_from_the_right(passes, source, legs, budget)
        else:
            cores = _split_from_the_left(passes, source, legs, budget)
    cores = [core.astype(source.dtype, copy=False) for core in cores]
    return TensorTrain.from_sweep(cores, len(cores) - 1, source.exponent), budget


def _split_in_the_middle(
    passes: Passes, source: ArraySource, legs: Sequence[Sequence[int]], budget: TruncationBudget
) -> list[Array] | None:
    """Return the cores, None where a sample of rows does not show low ranks or the projection misses the tolerance."""
    if len(legs) < 2 or (budget.rtol is None and budget.max_rank is not None):
        return None
    sizes = [math.prod(source.shape[a] for a in axes) for axes in legs]
    half = min(range(1, len(sizes)), key=lambda k: math.prod(sizes[:k]) + math.prod(sizes[k:]))
    kept = [a for axes in legs[half:] for a in axes]
    basis = sampled_row_space(passes, source, kept, budget.threshold)
    if basis is None or 8 * len(basis) * max(source.size // basis.shape[1], basis.shape[1]) > passes.limit.sums // 12:
        return None
    columns, budget.norm = times_rows(passes, source, kept, basis)
    if columns is None:  # the scale of the sample is not that of the array
        return None
    with budget.trial() as trial:
        head, _ = split_legs(columns.reshape(1, -1), sizes[:half], budget)
        rest, discarded = project_columns(
            passes, source, kept, merge_cores(head), norm=budget.norm, negligible=budget.negligible
        )
        if not trial.commit_measured(discarded):
            return None
    tail, rest = split_legs(rest, sizes[half:-1], budget)
    return [*head, *tail, rest.reshape(-1, sizes[-1], 1)]


def _split_from_the_left(
    passes: Passes, source: ArraySource, legs: Sequence[Sequence[int]], budget: TruncationBudget
) -> list[Array]:
    sizes = [math.prod(source.shape[a] for a in axes) for axes in legs]
    cores: list[Array] = []
    current = source
    groups = [tuple(axes) for axes in legs]  # of `current`, whose first axis is the bond after the first step
    while (current.on_workers and len(groups) > 1) or not passes.limit.holds(8 * current.size):
        head, projected = _split_first_legs(passes, current, groups, budget)
        current = passes.as_source(projected)
        cores += head
        first = groups[len(head)][0] - 1  # all axes before it have become the bond
        groups = [tuple(a - first for a in axes) for axes in groups[len(head) :]]
    rest = np.asarray(current.read_all())
    bond = cores[-1].shape[-1] if cores else 1
    if not cores:
        budget.norm = float(np.linalg.norm(rest))
    tail, rest = split_legs(rest.reshape(bond, -1), sizes[len(cores) : -1], budget)
    return [*cores, *tail, rest.reshape(-1, sizes[-1], 1)]


def _split_from_the_right(
    passes: Passes, source: DaskSource, legs: Sequence[Sequence[int]], budget: TruncationBudget
) -> list[Array]:
    """Return the cores from the train of the transposed array: chunks that divide the first legs hold the last ones.

    They are left-canonical as well, with positive leading entries.
    """
    turned = source.permuted([a for axes in reversed(legs) for a in axes])
    starts = [0, *itertools.accumulate(len(axes) for axes in reversed(legs))]
    budget.sides = budget.sides[::-1]
    budget.max_rank = budget.max_rank[::-1] if isinstance(budget.max_rank, tuple) else budget.max_rank
    cores = _split_from_the_left(passes, turned, [range(*ends) for ends in itertools.pairwise(starts)], budget)
    budget.records.reverse()
    turned_back = TensorTrain.from_sweep([core.transpose(2, 1, 0) for core in reversed(cores)], 0)
    train = move_center(turned_back, len(cores) - 1)
    source.exponent = turned.exponent + train.exponent
    cores = list(train.cores)
    for k in range(len(cores) - 1):
        phases = leading_phases(cores[k].reshape(-1, cores[k].shape[-1]), source.dtype)
        cores[k], cores[k + 1] = cores[k] * phases.conj(), phases[:, None, None] * cores[k + 1]
    return cores


def _split_first_legs(
    passes: Passes, current: ArraySource, groups: Sequence[tuple[int, ...]], budget: TruncationBudget
) -> tuple[list[Array], Array]:
    """Return the cores of the first few legs and the projected array (r, other axes)."""
    if len(groups) == 1:
        raise ArgumentError(
            f"{current.function}: storage.memory must hold the last core three times, {24 * current.size:,} bytes, got "
            f"{passes.limit.total:,}; raise memory, or split its leg."
        )
    bond = current.shape[0] if groups[0][0] > 0 else 1
    count, spectrum = _svd_of_first_legs(passes, current, groups, budget)
    sizes = [math.prod(current.shape[a] for a in axes) for axes in groups[:count]]

    def choose(svd: LeftSVD) -> list[Array]:
        return isometries(svd, bond, sizes, budget)

    def basis_of(_: LeftSVD, cores: list[Array]) -> Array:
        basis = merge_cores(cores)
        if not passes.limit.holds(8 * current.size):
            _refuse_no_saving(current, len(basis), basis.shape[1], budget)
        return basis

    axes = range(groups[count][0])
    cores, _, projected = project_truncated(passes, current, axes, spectrum, budget, choose, basis_of)
    return cores, projected


def _svd_of_first_legs(
    passes: Passes, current: ArraySource, groups: Sequence[tuple[int, ...]], budget: TruncationBudget
) -> tuple[int, LegSVD]:
    """Return a number of legs whose matrix has a low rank, or else the most that memory allows, and its left SVD."""
    rows = [math.prod(current.shape[: axes[0]]) for axes in groups[1:]]
    cap = _largest_cap(budget.max_rank)
    largest = passes.limit.largest_gram(current.dtype)
    if rows[0] > largest:
        raise ArgumentError(
            f"{current.function}: storage.memory must hold a Gram matrix of the {rows[0]:,} rows of leg 0, got "
            f"{passes.limit.total:,} bytes; raise memory, or split this leg."
        )
    counts = sorted({max(1, sum(n <= most for n in rows)) for most in (*ROWS, largest) if most <= largest})
    joined = [k for k in counts if joined_size(current, range(groups[k][0])) <= passes.limit.largest_tile]
    for count in joined or counts[:1]:
        m = rows[count - 1]
        spectrum = first_svd(passes, current, range(groups[count][0]), budget)
        kept = int(np.count_nonzero(spectrum.svd.s > budget.threshold))
        if 2 * min(kept, m if cap is None else cap) <= m:
            break
    return count, spectrum


def _largest_cap(max_rank: Caps) -> int | None:
    return max(cap or 1 for cap in max_rank) if isinstance(max_rank, tuple) else max_rank


def _refuse_no_saving(current: ArraySource, rows: int, rank: int, budget: TruncationBudget) -> None:
    if rank > _SMALLEST_SAVING * rows:
        criterion: Any = "the numerical rank" if budget.rtol is None else f"rtol={budget.rtol:g}"
        raise ArgumentError(
            f"{current.function}: {current.parameter} must have low ranks, or fit in memory; {criterion} "
            f"keeps {rank:,} of {rows:,} singular values of its first legs; raise rtol, cap the rank, or raise memory."
        )


def _decompose_in_one_read(read: OneRead, rtol: float | None, max_rank: MaxRank) -> tuple[TensorTrain, SketchedError]:
    """Return the left-canonical train of an array that is read once, and the estimate of its error."""
    read.require_legs(2)
    width = require_rank(read.function, _largest_cap(max_rank))
    sizes = read.shape
    half = min(range(1, len(sizes)), key=lambda k: math.prod(sizes[:k]) + _COLUMN_COST * math.prod(sizes[k:]))
    sketch = SketchedMatrix(read, range(half), width)
    sides = [min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes))]
    budget = sketch.budget(rtol, sides, read.dtype, max_rank)
    head, rest = split_legs(sketch.left.reshape(1, -1), sizes[:half], budget)
    tail, rest = split_legs(rest @ sketch.right, sizes[half:-1], budget)
    last = rest.reshape(-1, sizes[-1], 1)
    right = merge_cores([*tail, last]).reshape(head[-1].shape[2], -1)  # r (n ... n)
    error = sketch.relative_error(merge_cores(head), right)
    cores = [core.astype(read.dtype, copy=False) for core in (*head, *tail, last)]
    return TensorTrain.from_sweep(cores, len(cores) - 1, sketch.exponent), SketchedError(error)
