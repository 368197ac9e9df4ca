"""A format with smaller ranks, as far as a tolerance allows."""

from __future__ import annotations

from typing import Any, TypeVar

from tnlib._errors import ArgumentTypeError
from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_max_rank, as_rtol
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker
from tnlib.gauge.tucker import orthonormal_factors
from tnlib.linalg.product import product_svd
from tnlib.linalg.scale import exponent, norm, shift
from tnlib.linalg.threads import own_threads
from tnlib.ops.operator_schmidt import round_terms
from tnlib.ops.trains import put_together, take_apart
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.hosvd import st_hosvd
from tnlib.sweeps.round import gather, truncate

F = TypeVar("F", TensorTrain, TTMatrix, Tucker, SVD, LowRank, KroneckerTerms)


@own_threads
def round(t: F, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[F]:
    """Lower the ranks of `t` so that norm(t.full() - fit.value.full()) <= rtol * norm(t.full()).

    Nothing dense is made: the cost is linear in the count of cores.

    Parameters
    ----------
    t
        A TensorTrain, TTMatrix, Tucker, SVD, LowRank or KroneckerTerms, its dtype 32 or 64 bits a component.
    rtol
        Relative Frobenius error of the whole. Without it and `max_rank`: the numerical ranks.
    max_rank
        Cap on every rank; the smaller one wins.

    Returns
    -------
    Fit
        Of the same type. Trains come left-canonical with the last core as their centre, in the basis of left
        singular vectors on every bond, so that two trains of one tensor become the same; Tucker as `tucker` leaves
        it; LowRank with orthonormal rows on its right; KroneckerTerms in operator Schmidt form, left terms orthonormal
        in the Frobenius product and right ones orthogonal, their norms the Schmidt values, descending.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `t` is none of these, or a tolerance is off.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), Algorithm 2.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> twice = tnlib.TensorTrain([np.ones((1, 4, 2)), np.ones((2, 5, 2)), np.ones((2, 6, 1))])
    >>> fit = tnlib.round(twice)
    >>> fit.value.ranks, f"{fit.value.full()[0, 0, 0]:.3f}"
    ((1, 1, 1, 1), '4.000')
    """
    rtol, max_rank = as_rtol("round", rtol), as_max_rank("round", max_rank)
    value: Any
    if isinstance(t, TensorTrain | TTMatrix):
        value, budget = _train(t, rtol, max_rank)
    elif isinstance(t, Tucker):
        value, budget = _tucker(t, rtol, max_rank)
    elif isinstance(t, SVD | LowRank):
        value, budget = _two_factors(t, rtol, max_rank)
    elif isinstance(t, KroneckerTerms):
        value, budget = round_terms(t, rtol, max_rank)
    else:
        raise ArgumentTypeError(
            "round: t must be a TensorTrain, TTMatrix, Tucker, SVD, LowRank or KroneckerTerms, got a "
            f"{type(t).__name__}; decompose what you have first, for example with tnlib.tt_svd."
        )
    cuts = ", ".join(str(k + 1) for k in budget.cuts)
    notes = (f"max_rank separates equal singular values at bond {cuts}; another rank would be unique",) if cuts else ()
    return report("round", value, error=budget.error, rtol=rtol, notes=notes)


def _train(t: Any, rtol: float | None, max_rank: int | None) -> tuple[Any, Budget]:
    cores, twos, factor = take_apart(t)
    cores, more = gather(cores)
    sides = [max(core.shape[0], len(cores)) for core in cores[1:]]
    budget = Budget(norm(cores[0]), rtol, sides, t.dtype)
    cores, _ = truncate(cores, budget, max_rank)
    return put_together(t, cores, len(cores) - 1, twos + more, factor), budget


def _tucker(t: Tucker, rtol: float | None, max_rank: int | None) -> tuple[Tucker, Budget]:
    core, bases, twos = orthonormal_factors(t.core, t.factors)
    sides = [min(n, max(1, core.size // n)) for n in core.shape]
    budget = Budget(norm(core), rtol, sides, t.dtype)
    small, wide = st_hosvd(core, budget, [max_rank] * core.ndim, bases)
    factors = [factor.astype(t.dtype, copy=False) for factor in wide]
    return Tucker(shift(small.astype(t.dtype, copy=False), twos), tuple(factors)), budget


def _two_factors(t: SVD | LowRank, rtol: float | None, max_rank: int | None) -> tuple[SVD | LowRank, Budget]:
    left, s, right = (t.u, t.s, t.vh) if isinstance(t, SVD) else _product(t)
    twos = exponent(s)
    scaled = shift(s, -twos)
    budget = Budget(norm(scaled), rtol, [len(s)], t.dtype)
    rank = budget.choose(scaled, max_rank=max_rank)
    if isinstance(t, SVD):
        return SVD(left[..., :rank].copy(), s[:rank].copy(), right[:rank].copy(), t.left), budget
    return LowRank(left[:, :rank] * s[:rank], right[:rank]), budget


def _product(t: LowRank) -> tuple[Array, Array, Array]:
    """Return the SVD of the product; factors are brought into range first, so that theirs is that of the result."""
    left, right = t.left.astype(t.dtype, copy=False), t.right.astype(t.dtype, copy=False)
    e, f = exponent(left), exponent(right)
    u, s, vh = product_svd(shift(left, -e), shift(right, -f))
    return u, shift(s, e + f), vh
