r"""A dense array to the cores of a train.

Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), Algorithm 1, from the left: each step leaves

    |>--|>--|>--(rest)          |>  left-isometric core
    |   |   |   | | |

so the last core is the centre and carries the norm. Three things make it fast on large arrays. A truncation from the
left needs only the left singular vectors of its matrix A, which A A^H has: anything small that stands in for A may be
decomposed in its place (`left_svd`). So several legs are split off at once, at the price of one pass over the data. And
an array of low ranks is first cut in the middle (`sampled_split`), after which nothing large is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.left import Left, left_svd
from tnlib.linalg.project import adjoint_times, project
from tnlib.linalg.sampled import sampled_columns
from tnlib.sweeps.budget import Budget

# Rows of the matrix whose left singular vectors are found at once: first the smaller count, and where more than half
# of its singular vectors are needed, so that little is gained, the larger one.
_ROWS = (64, 512)
_SAMPLED = 1 << 16  # entries; below, a sample saves nothing


def dense_to_cores(x: Array, budget: Budget, max_rank: int | None) -> list[Array]:
    """Split `x` (n[0], ..., n[d-1]) into a train by d - 1 truncations from the left.

    `x` is the whole tensor of `budget`, or what earlier truncations left of it.
    """
    *legs, last = x.shape
    size = budget.norm if budget.step == 0 else None
    cores, rest = _sweep(x.reshape(1, -1), tuple(legs), budget, max_rank, size)
    if not legs:
        rest = rest.copy()  # of one leg it is x itself
    return [core.astype(x.dtype, copy=False) for core in [*cores, rest.reshape(-1, last, 1)]]


def _sweep(
    x: Array, legs: Sequence[int], budget: Budget, max_rank: int | None, size: float | None = None
) -> tuple[list[Array], Array]:
    """Split `legs` off `x` (l, legs ... t), of norm `size` if known; return their cores and what is left, (r, t)."""
    cores: list[Array] = []
    rest = x
    while legs:
        found = _by_a_sample(rest, legs, budget, max_rank, size)
        head, rest = found if found is not None else _by_a_gram_matrix(rest, legs, budget, max_rank, size)
        cores += head
        legs, size = legs[len(head) :], None
    return cores, rest


def _by_a_sample(
    rest: Array, legs: Sequence[int], budget: Budget, max_rank: int | None, size: float | None
) -> tuple[list[Array], Array] | None:
    """Return the cores of half of the `legs` and what they leave, or None where the rank is not seen to be low.

    With few columns C = A V^H in the place of A, V V^H = 1, and E E^H the projection that the cores of C make,

        norm(A - E E^H A)^2  =  norm(C - E E^H C)^2 + norm((1 - E E^H) (A - C V))^2,

    so the sweep over C knows nearly all of the error, and what it cannot know is measured.
    """
    if rest.size < _SAMPLED or (budget.rtol is None and max_rank is not None):
        return None  # with a cap alone the best error is asked for, not one within bounds
    rows = [len(rest) * math.prod(legs[: k + 1]) for k in range(len(legs))]
    half = min(range(len(legs)), key=lambda i: (rows[i] + rest.size // rows[i], -i))  # a tall one is cheaper to sample
    flat = rest.reshape(rows[half], -1)
    columns = sampled_columns(flat, limit=budget.limit)
    if columns is None:
        return None
    start = budget.step
    head, _ = _sweep(columns.reshape(len(rest), -1), legs[: half + 1], budget, max_rank)
    below, lost = project(
        _merge(head), flat, size=size, negligible=budget.negligible
    )  # r [(l n0 ... nk)] (n(k+1) ... t)
    if not budget.settle(start, lost):
        budget.rewind(start)
        return None
    return head, below


def _by_a_gram_matrix(
    rest: Array, legs: Sequence[int], budget: Budget, max_rank: int | None, size: float | None
) -> tuple[list[Array], Array]:
    """Return the cores of the first few `legs` and what they leave."""
    start, limit = budget.step, budget.limit
    for rows in _ROWS:
        count = max([1, *(k for k in range(1, len(legs) + 1) if len(rest) * math.prod(legs[:k]) <= rows)])
        flat = rest.reshape(len(rest) * math.prod(legs[:count]), -1)
        found = left_svd(flat[None], exact=False)
        if 2 * np.count_nonzero(found.s > limit) <= len(flat):
            break
    if budget.admits(found.blur, max_rank):
        cores = _isometries(found, len(rest), legs[:count], budget, max_rank, exact=found.blur == 0.0)
        if budget.clear(start, found.blur):
            if found.blur == 0.0 or budget.lost(start) == 0.0:
                return cores, adjoint_times(_merge(cores), flat[None])[0]
            below, lost = project(_merge(cores), flat, size=size, negligible=budget.negligible)
            if budget.settle(start, lost):  # measured, it is free of the blur
                return cores, below
        budget.rewind(start)
    found = left_svd(flat[None], exact=True)
    cores = _isometries(found, len(rest), legs[:count], budget, max_rank, exact=True)
    return cores, adjoint_times(_merge(cores), flat[None])[0]  # r [(l n0 ... nk)] (n(k+1) ... t)


def _isometries(
    found: Left, left: int, legs: Sequence[int], budget: Budget, max_rank: int | None, *, exact: bool
) -> list[Array]:
    """Return the left-isometric cores (l, n, r) of `legs`, by what stands in for their matrix (l legs, others)."""
    cores: list[Array] = []
    if len(legs) == 1:
        return [_isometry(found, left, budget, max_rank)]
    rest = found.u * found.s  # (l n0 ... nk) (others)
    for n in legs:
        flat = rest.reshape(left * n, -1)
        cores.append(_isometry(left_svd(flat[None], exact=exact), left, budget, max_rank))
        rest = _merge(cores[-1:]).conj().T @ flat
        left = len(rest)
    return cores


def _isometry(found: Left, left: int, budget: Budget, max_rank: int | None) -> Array:
    rank = budget.choose(found.s, max_rank=max_rank, blur=found.blur)
    u, s = found.u[:, :rank], found.s[:rank]
    turn = fixing_turn(u, s, budget.dtype, squared=found.blur > 0.0)
    return turn.columns(u).reshape(left, -1, rank)  # l n r


def _merge(cores: Sequence[Array]) -> Array:
    """Return cores (l, n, r) ... (r', n', r'') as one matrix (l n ... n', r'')."""
    out = cores[0].reshape(-1, cores[0].shape[-1])
    for core in cores[1:]:
        out = (out @ core.reshape(len(core), -1)).reshape(-1, core.shape[-1])  # (l n [r]) [r] n' r'
    return out
