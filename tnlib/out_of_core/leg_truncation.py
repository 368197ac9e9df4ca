"""Truncation of a group of legs of an array that is read by tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram_svd import LeftSVD, gram_resolution
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.array_source import ArraySource
from tnlib.out_of_core.leg_reduction import LegSVD, project_legs, svd_of_legs
from tnlib.out_of_core.scale import set_scale
from tnlib.out_of_core.tile_passes import Passes

Chosen = TypeVar("Chosen")
_RESOLVED = 4.5  # times the error of a Gram spectrum


def truncate_legs(
    passes: Passes, source: ArraySource, legs: Sequence[int], budget: TruncationBudget, max_rank: int | None
) -> tuple[Array, Array]:
    """Return orthonormal columns E (q, r) for the next truncation of `budget`, and the projected array (r, others)."""

    def choose(svd: LeftSVD) -> int:
        return budget.truncate(svd.s, max_rank=max_rank, error_estimate=svd.error_estimate)

    def basis_of(svd: LeftSVD, rank: int) -> Array:
        u, s = svd.u[:, :rank], svd.s[:rank]
        return canonical_basis_change(u, s, budget.dtype, squared=svd.error_estimate != 0.0).columns(u)

    spectrum = first_svd(passes, source, legs, budget, max_rank)
    _, basis, projected = project_truncated(passes, source, legs, spectrum, budget, choose, basis_of)
    return basis, projected


def project_truncated(
    passes: Passes,
    source: ArraySource,
    legs: Sequence[int],
    spectrum: LegSVD,
    budget: TruncationBudget,
    choose: Callable[[LeftSVD], Chosen],
    basis_of: Callable[[LeftSVD, Chosen], Array],
) -> tuple[Chosen, Array, Array]:
    """Truncate the left SVD of legs, and project the source onto what is kept.

    Where the errors of a Gram spectrum leave the truncation open, or the measured error of the projection exceeds the
    budget, it is done again with the SVD of triangular factors, whose discarded part is the error.

    Parameters
    ----------
    passes, source, legs
        The source, and the legs whose matrix is truncated.
    spectrum
        Its left SVD.
    budget
        Budget that `choose` truncates by.
    choose
        Function that truncates a left SVD.
    basis_of
        Function that returns orthonormal columns (q, r) of it.

    Returns
    -------
    What `choose` returned, its columns, and the projected array (r, others).
    """
    while True:
        svd, exact = spectrum.svd, spectrum.svd.error_estimate == 0.0
        with budget.trial() as trial:
            chosen = choose(svd)
            if exact or not any(record.ambiguous for record in trial.records):
                basis = basis_of(svd, chosen)
                projected, discarded = project_legs(
                    passes, source, legs, basis, norm=budget.norm, discarded=trial.discarded
                )
                if exact:
                    trial.commit()
                if exact or trial.commit_measured(discarded):
                    return chosen, basis, projected
                passes.discard(projected)
        spectrum = scaled_svd(passes, source, legs, budget, exact=True)


def first_svd(
    passes: Passes, source: ArraySource, legs: Sequence[int], budget: TruncationBudget, max_rank: int | None
) -> LegSVD:
    """Return the left SVD of legs from a Gram matrix, or from triangular factors if it would miss the tolerance."""
    rows = int(np.prod([source.shape[a] for a in legs]))
    exact = max_rank is None and _RESOLVED * gram_resolution(rows) * budget.norm > budget.threshold
    return scaled_svd(passes, source, legs, budget, exact=exact)


def scaled_svd(
    passes: Passes, source: ArraySource, legs: Sequence[int], budget: TruncationBudget, *, exact: bool
) -> LegSVD:
    """Return `svd_of_legs`; the first one determines the scale of the source and the norm of the budget."""
    spectrum = svd_of_legs(passes, source, legs, exact=exact)
    if not budget.records and source.exponent == 0:
        spectrum = set_scale(source, spectrum)
        budget.norm = spectrum.norm
    return spectrum
