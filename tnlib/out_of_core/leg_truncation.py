"""Truncation of a group of legs of an array that is read by tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram_svd import gram_resolution
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.array_source import ArraySource
from tnlib.out_of_core.leg_reduction import LegSVD, project_legs, svd_of_legs
from tnlib.out_of_core.passes import Passes
from tnlib.out_of_core.scale import set_scale

_RESOLVED = 4.5  # times the error of a Gram spectrum


def truncate_legs(
    passes: Passes, source: ArraySource, legs: Sequence[int], budget: TruncationBudget, max_rank: int | None
) -> tuple[Array, Array]:
    """Return orthonormal columns E (q, r) for the next truncation of `budget`, and the projected array (r, others)."""
    spectrum = first_svd(passes, source, legs, budget, max_rank)
    while True:
        with budget.trial() as trial:
            svd = spectrum.svd
            rank = budget.truncate(svd.s, max_rank=max_rank, error_estimate=svd.error_estimate)
            exact = svd.error_estimate == 0.0
            if exact or not trial.records[0].ambiguous:
                u, s = svd.u[:, :rank], svd.s[:rank]
                basis = canonical_basis_change(u, s, budget.dtype, squared=not exact).columns(u)
                projected, discarded = project_legs(
                    passes, source, legs, basis, norm=budget.norm, discarded=trial.discarded
                )
                if exact:
                    trial.commit()
                if exact or trial.commit_measured(discarded):
                    return basis, projected
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
