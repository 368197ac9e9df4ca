"""Cores of the first legs of an array in memory, split off by truncations from the left.

Two things make it fast on large arrays. A truncation from the left needs only the left singular vectors of its matrix
A, which A A^H determines: any small matrix with the same A A^H may be decomposed instead (`left_svd`), so several legs
are split off in one pass over the data. And an array of low ranks is first cut in the middle by a sample of its rows
(`_split_by_sampling`), after which nothing large is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.canonical_basis import canonical_basis_change, canonical_columns
from tnlib.linalg.gram import adjoint_times, project
from tnlib.linalg.gram_svd import LeftSVD, left_svd
from tnlib.linalg.randomized import sampled_range
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.truncation import TruncationBudget

# Rows of the matrix whose left singular vectors are computed at once: the smaller number first, the larger one where
# more than half of the singular vectors are needed, so that little is gained.
ROWS = (64, 512)
_SHORT = 1 << 14  # entries up to which SVDs leg by leg are the fastest
_SAMPLED_SIZE = 1 << 16  # entries below which a sample saves nothing


def split_legs(
    x: Array, legs: Sequence[int], budget: TruncationBudget, norm: float | None = None
) -> tuple[list[Array], Array]:
    """Split `legs` off `x` (l, legs ... t), of norm `norm` if known; return their cores and the rest (r, t)."""
    cores: list[Array] = []
    rest = x
    while legs:
        if rest.size <= _SHORT:
            return _split_by_svds(cores, rest, legs, budget)
        if (sampled := _split_by_sampling(rest, legs, budget, norm)) is not None:
            head, rest = sampled
        else:
            head, rest = _split_by_gram_matrix(rest, legs, budget, norm)
        cores += head
        legs, norm = legs[len(head) :], None
    return cores, rest


def _split_by_sampling(
    rest: Array, legs: Sequence[int], budget: TruncationBudget, norm: float | None
) -> tuple[list[Array], Array] | None:
    """Return the cores of half of the `legs` and the rest, or None where a sample does not show a low rank.

    With few columns C = A V^H instead of A, V V^H = 1, and E E^H the projection that the cores of C make,

        norm(A - E E^H A)^2  =  norm(C - E E^H C)^2 + norm((1 - E E^H) (A - C V))^2,

    so the sweep over C accounts for nearly all of the error, and the second term is measured.
    """
    if rest.size < _SAMPLED_SIZE or (budget.rtol is None and budget.max_rank is not None):
        return None  # with a cap alone the error is to be the smallest, not one within bounds
    rows = [len(rest) * math.prod(legs[: k + 1]) for k in range(len(legs))]
    half = min(range(len(legs)), key=lambda i: (rows[i] + rest.size // rows[i], -i))  # a tall matrix samples cheaper
    flat = rest.reshape(rows[half], -1)
    columns = sampled_range(flat, limit=budget.threshold)
    if columns is None:
        return None
    with budget.trial() as trial:
        head, _ = split_legs(columns.reshape(len(rest), -1), legs[: half + 1], budget)
        # r [(l n0 ... nk)] (n(k+1) ... t)
        projected, discarded = project(merge_cores(head), flat, size=norm, negligible=budget.negligible)
        return (head, projected) if trial.commit_measured(discarded) else None


def _split_by_gram_matrix(
    rest: Array, legs: Sequence[int], budget: TruncationBudget, norm: float | None
) -> tuple[list[Array], Array]:
    """Return the cores of the first few `legs` and the rest."""
    threshold = budget.threshold
    for rows in ROWS:
        count = max([1, *(k for k in range(1, len(legs) + 1) if len(rest) * math.prod(legs[:k]) <= rows)])
        flat = rest.reshape(len(rest) * math.prod(legs[:count]), -1)
        left = left_svd(flat.reshape(1, *flat.shape), exact=False)
        if 2 * np.count_nonzero(left.s > threshold) <= len(flat):
            break
    if budget.admits(left.error_estimate):
        with budget.trial() as trial:
            cores = isometries(left, len(rest), legs[:count], budget)
            if trial.is_resolved(left.error_estimate):
                if left.error_estimate == 0.0 or trial.discarded == 0.0:
                    trial.commit()
                    return cores, _projected(cores, flat)
                projected, discarded = project(merge_cores(cores), flat, size=norm, negligible=budget.negligible)
                if trial.commit_measured(discarded):  # measured, it is free of the error estimate
                    return cores, projected
    left = left_svd(flat.reshape(1, *flat.shape), exact=True)
    cores = isometries(left, len(rest), legs[:count], budget)
    return cores, _projected(cores, flat)  # r [(l n0 ... nk)] (n(k+1) ... t)


def _projected(cores: Sequence[Array], flat: Array) -> Array:
    """Return the rest (r, n) of `flat` (m, n), projected on the isometry of `cores`."""
    return adjoint_times(merge_cores(cores), flat.reshape(1, *flat.shape)).reshape(-1, flat.shape[1])


def _split_by_svds(
    cores: list[Array], rest: Array, legs: Sequence[int], budget: TruncationBudget
) -> tuple[list[Array], Array]:
    """Return `cores` with those of all `legs` behind them, and the rest; SVD by SVD."""
    for leg in legs:
        left = len(rest)
        flat = rest.reshape(left * leg, -1)
        u, s, _ = thin_svd(flat)
        rank = budget.truncate(s)
        if rank < len(s):
            u, s = u[:, :rank], s[:rank]
        basis = canonical_columns(u, s, budget.dtype)
        cores.append(basis.reshape(left, leg, rank))
        # The product with the matrix itself is right to roundoff, as that of s and vh is not where values cluster. The
        # method takes 0.5 us less than the operator.
        rest = basis.conj().T.dot(flat)
    return cores, rest


def isometries(svd: LeftSVD, left: int, legs: Sequence[int], budget: TruncationBudget) -> list[Array]:
    """Return the left-isometric cores (l, n, r) of `legs` from the left SVD of their matrix (l legs, others)."""
    if len(legs) == 1:
        return [_isometry(svd, left, budget)]
    cores: list[Array] = []
    exact = svd.error_estimate == 0.0
    rest = svd.u * svd.s  # (l n0 ... nk) (others)
    for n in legs:
        flat = rest.reshape(left * n, -1)
        cores.append(_isometry(left_svd(flat[None], exact=exact), left, budget))
        rest = merge_cores(cores[-1:]).conj().T @ flat
        left = len(rest)
    return cores


def _isometry(svd: LeftSVD, left: int, budget: TruncationBudget) -> Array:
    rank = budget.truncate(svd.s, error_estimate=svd.error_estimate)
    u, s = svd.u[:, :rank], svd.s[:rank]
    change = canonical_basis_change(u, s, budget.dtype, squared=svd.error_estimate > 0.0)
    return change.columns(u).reshape(left, -1, rank)  # l n r


def merge_cores(cores: Sequence[Array]) -> Array:
    """Return isometric cores (l, n, r) ... (r', n', r'') as one matrix (l n ... n', r'')."""
    out = cores[0].reshape(-1, cores[0].shape[-1])
    for core in cores[1:]:
        out = (out @ core.reshape(len(core), -1)).reshape(-1, core.shape[-1])  # (l n [r]) [r] n' r'
    return out
