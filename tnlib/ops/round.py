"""Rounding: lower ranks within a tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tnlib._fit import Fit, report, wrong_type
from tnlib._format import Format
from tnlib._registry import require
from tnlib._validate import as_degeneracy_tol, as_max_ranks, as_rtol, check_bonds, refuse_foreign_keywords
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.linalg.threads import single_threaded_blas

F = TypeVar("F", bound=Format)


@single_threaded_blas
@refuse_foreign_keywords
def round(
    t: F, *, rtol: float | None = None, max_rank: int | Sequence[int] | None = None, degeneracy_tol: float = 0.0
) -> Fit[F]:
    """Truncate the ranks of `t` such that norm(t.full() - fit.value.full()) <= rtol * norm(t.full()).

    No dense array is formed: the cost is linear in the number of cores.

    Parameters
    ----------
    t
        A TensorTrain, TTMatrix, Tucker, SVD, LowRank or KroneckerTerms, its dtype 32 or 64 bits a component.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, and maximal value of every rank, of a train also a sequence of one
        for each of the d - 1 bonds. The smaller rank is used; if both are None, the numerical ranks.
    degeneracy_tol
        Of a train: neighbouring singular values whose relative difference is at most this belong to one group, which
        is kept or discarded as a whole, so that a truncation of a multiplet keeps the symmetry of a state. With `rtol`
        the group at the cut is kept; where it ends beyond `max_rank`, it is discarded, unless it is the first group.

    Returns
    -------
    Fit
        A format of the same type. Trains are left-canonical, in the basis of left singular vectors on every bond, which
        depends on the tensor alone; Tucker is in the gauge of `tucker`; LowRank has orthonormal rows in `right`;
        KroneckerTerms in operator Schmidt form, left terms orthonormal in the Frobenius product, right ones orthogonal
        and descending.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), Algorithm 2.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> cores = [np.ones((1, 4, 2)), np.ones((2, 5, 2)), np.ones((2, 6, 1))]
    >>> twice = tnlib.TensorTrain(cores)
    >>> fit = tnlib.round(twice)
    >>> fit.value.ranks, f"{fit.value.full()[0, 0, 0]:.3f}"
    ((1, 1, 1, 1), '4.000')
    """
    rtol, max_rank = as_rtol("round", rtol), as_max_ranks("round", max_rank)
    advice = "decompose it first, for example with tnlib.tt_svd"
    advice = "pass sum(t), or tnlib.round_randomized(t)" if isinstance(t, list | tuple) else advice
    lower_ranks = require("round", "round", "t", t, advice)
    check_bonds("round", max_rank, len(t.cores) - 1 if isinstance(t, TensorTrain | TTMatrix) else None)
    tolerance = as_degeneracy_tol("round", degeneracy_tol)
    if tolerance and not isinstance(t, TensorTrain | TTMatrix):
        raise wrong_type("round", "t", "a TensorTrain or TTMatrix with degeneracy_tol", t, "leave degeneracy_tol out")
    options = {"degeneracy_tol": tolerance} if tolerance else {}
    value, budget = lower_ranks(t, rtol, max_rank, **options)
    return report("round", value, error=budget.error, rtol=rtol, notes=budget.notes("bond", first=1))
