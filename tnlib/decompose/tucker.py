"""Dense arrays to the Tucker format: sequentially truncated HOSVD, then orthogonal iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_count, as_rtol, as_sizes
from tnlib.decompose.prepare import prepare
from tnlib.formats.tucker import Tucker
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.left import left_svd
from tnlib.linalg.modes import mode_product
from tnlib.linalg.orthogonal import fill_columns
from tnlib.linalg.scale import distance, shift
from tnlib.linalg.threads import own_threads
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.hosvd import st_hosvd


@own_threads
def tucker(
    x: Any,
    *,
    rtol: float | None = None,
    ranks: int | Sequence[int] | None = None,
    n_iter: int = 0,
) -> Fit[Tucker]:
    """Decompose `x` into a core and one factor per leg so that norm(x - fit.value.full()) <= rtol * norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), d >= 1, real or complex, 32 or 64 bits a component.
    rtol
        Relative Frobenius error of the whole. Without it and `ranks`: the numerical multilinear ranks.
    ranks
        Cap on the rank of every leg, one number for all or one per leg; the smaller rank wins.
    n_iter
        Sweeps of higher-order orthogonal iteration after the first decomposition, at its ranks. They lower the
        error, often by little.

    Returns
    -------
    Fit[Tucker]
        Factors (n[k], r[k]) with orthonormal columns and positive leading entries; the core is x times their
        adjoints. Before iteration the error is at most sqrt(d) times the smallest possible one.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `x` is not a finite array of numbers, or a tolerance, rank or count is off.

    References
    ----------
    N. Vannieuwenhoven, R. Vandebril, K. Meerbergen, "A new truncation strategy for the higher-order singular
    value decomposition", SIAM J. Sci. Comput. 34 (2012), Algorithm 1. L. De Lathauwer, B. De Moor,
    J. Vandewalle, "On the best rank-1 and rank-(R1, ..., RN) approximation of higher-order tensors", SIAM J.
    Matrix Anal. Appl. 21 (2000), Algorithm 4.2.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> i = np.arange(10.0)
    >>> fit = tnlib.tucker(i[:, None, None] + i[:, None] + i)
    >>> fit.value.ranks, fit.value.n_parameters
    ((2, 2, 2), 68)
    """
    rtol, n_iter = as_rtol("tucker", rtol), as_count("tucker", "n_iter", n_iter, least=0)
    scaled, exponent, norm = prepare("tucker", "x", x)
    caps = _as_caps(ranks, scaled.ndim)

    sides = [min(n, scaled.size // n) for n in scaled.shape]
    budget = Budget(norm, rtol, sides, scaled.dtype)
    core, bases = st_hosvd(scaled, budget, caps)
    core, factors = core.astype(scaled.dtype, copy=False), [basis.astype(scaled.dtype, copy=False) for basis in bases]
    error = budget.error
    if n_iter and norm > 0:
        core, factors = _hooi(scaled, factors, n_iter)
        # sqrt(norm(x)^2 - norm(core)^2) would lose half of the digits; the residual itself keeps them
        error = distance(scaled, Tucker(core, tuple(factors)).full()) / norm

    value = Tucker(shift(core, exponent), tuple(factors))
    legs = ", ".join(map(str, budget.cuts))
    notes = (f"ranks separates equal singular values at leg {legs}; another rank would be unique",) if legs else ()
    return report("tucker", value, error=error, rtol=rtol, n_iter=n_iter, notes=notes)


def _as_caps(ranks: int | Sequence[int] | None, ndim: int) -> tuple[int | None, ...]:
    if ranks is None:
        return (None,) * ndim
    if not isinstance(ranks, Sequence | np.ndarray):
        return (as_count("tucker", "ranks", ranks),) * ndim
    caps = as_sizes("tucker", "ranks", ranks)
    if len(caps) != ndim:
        raise ArgumentError(
            f"tucker: ranks must be one number or {ndim}, one per leg, got {caps}; name every leg of the array."
        )
    return caps


def _hooi(x: Array, factors: list[Array], n_iter: int) -> tuple[Array, list[Array]]:
    """Improve all factors at fixed ranks: each becomes the best one for the others as they stand."""
    factors = list(factors)
    y = x
    for _ in range(n_iter):
        for k in range(x.ndim):
            y = x
            for j, factor in enumerate(factors):
                if j != k:
                    y = mode_product(y, factor.conj().T, j)  # r0 ... nk ... r(d-1)
            rank = factors[k].shape[1]
            slabs = np.ascontiguousarray(y).reshape(math.prod(y.shape[:k]), y.shape[k], -1)
            found = left_svd(slabs, exact=True)
            u = found.u[:, :rank]
            factors[k] = fixing_turn(u, found.s[:rank], x.dtype).columns(u).astype(x.dtype, copy=False)
            if u.shape[1] < rank:  # the other factors leave less than `rank` of this leg
                factors[k] = fill_columns(factors[k], rank)
    return np.ascontiguousarray(mode_product(y, factors[-1].conj().T, x.ndim - 1)), factors
