r"""Sequentially truncated higher-order SVD of an array that exceeds memory.

Two passes project one leg onto its leading left singular vectors (`out_of_core/leg_reduction.py`), and are repeated
with the projected array and the next leg until it fits in memory, where all legs are truncated once more:

    norm(x - y)^2  =  sum of the discarded weights of all truncations
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.tucker.st_hosvd import st_hosvd
from tnlib.linalg.scaling import norm
from tnlib.linalg.truncation import Truncation, TruncationBudget
from tnlib.out_of_core.array_source import ArraySource
from tnlib.out_of_core.leg_truncation import truncate_legs
from tnlib.out_of_core.tile_passes import Passes
from tnlib.out_of_core.tiling import joined_size


class _Reduced(NamedTuple):
    """An array in memory in the coordinates of `bases`, and the truncations that led to it, by their legs."""

    array: Array
    bases: list[Array | None]
    truncations: dict[int, Truncation]


def st_hosvd_of_source(
    passes: Passes, source: ArraySource, rtol: float | None, max_ranks: Sequence[int | None]
) -> tuple[Array, list[Array], TruncationBudget]:
    """Return the core, the orthonormal factors (n[k], r[k]) and the truncations, as `st_hosvd` of the whole array."""
    budget = TruncationBudget(1.0, rtol, [1] * len(source.shape), source.dtype)
    reduced = _reduce(passes, source, budget, max_ranks)
    left = rtol
    if rtol is not None and budget.norm > 0:
        spent = sum(record.charged for record in budget.records)
        left = math.sqrt(max(0.0, (rtol * budget.norm) ** 2 - spent)) / budget.norm
    core, factors, rest = st_hosvd(
        reduced.array, budget.norm, left, max_ranks, reduced.bases, dtype=source.dtype, shape=source.shape
    )
    for k, first in reduced.truncations.items():
        second = rest.records[k]
        rest.records[k] = second._replace(
            discarded=math.hypot(first.discarded, second.discarded),
            splits_group=first.splits_group or second.splits_group,
        )
    return core, factors, rest


def _reduce(passes: Passes, source: ArraySource, budget: TruncationBudget, max_ranks: Sequence[int | None]) -> _Reduced:
    """Project legs, those that save most first, until the array fits in memory."""
    bases: list[Array | None] = [None] * len(source.shape)
    truncations: dict[int, Truncation] = {}
    sides = [min(n, source.size // n) for n in source.shape]
    current, stored = source, None
    legs = list(range(len(source.shape)))  # of the axes of `current`
    while current.on_workers or not passes.limit.holds(8 * current.size):
        remaining = [k for k in legs if bases[k] is None]
        joined = [k for k in remaining if joined_size(current, [legs.index(k)]) <= passes.limit.largest_tile]
        leg = _leg_to_reduce(passes, current, joined or remaining, source.shape, max_ranks)
        if leg is None:
            break
        budget.sides = [*budget.sides[: len(budget.records)], *[sides[leg]] * (len(legs) - len(budget.records))]
        axis = legs.index(leg)
        basis, projected = truncate_legs(passes, current, [axis], budget, max_ranks[leg])
        if stored is not None:
            passes.discard(stored)
        bases[leg], truncations[leg] = basis, budget.records[-1]
        legs = [leg, *(k for k in legs if k != leg)]
        current, stored = passes.as_source(source, projected), projected
    core = np.array(current.read_all())
    if not truncations:
        budget.norm = norm(core)
    return _Reduced(np.ascontiguousarray(core.transpose(np.argsort(legs))), bases, truncations)


def _leg_to_reduce(
    passes: Passes, current: ArraySource, legs: Sequence[int], shape: Sequence[int], max_ranks: Sequence[int | None]
) -> int | None:
    """Return the leg with the largest ratio of size and cap among those whose Gram matrix fits.

    None where there is none and the array fits.
    """
    largest = passes.limit.largest_gram(np.result_type(current.dtype, np.float64).itemsize)
    fitting = [k for k in legs if 1 < shape[k] <= largest]
    if not fitting and passes.limit.holds(8 * current.size):
        return None
    if not fitting:
        raise ArgumentError(
            f"{current.function}: memory must hold the core, or a Gram matrix of another leg; the legs of sizes "
            f"{tuple(shape[k] for k in legs)} remain of {tuple(shape)}, got {passes.limit.total:,} bytes; raise memory "
            "or rtol, or cap the ranks."
        )
    return max(fitting, key=lambda k: (shape[k] / min(max_ranks[k] or shape[k], shape[k]), shape[k], k))
