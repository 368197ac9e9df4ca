r"""Sequentially truncated higher-order SVD of a dense array, and higher-order orthogonal iteration (HOOI).

One leg after the other is projected on the leading left singular vectors U_k of its unfolding; each step works on the
core that the steps before it left:

    core_k  =  U_k^H core_(k-1)  along leg k,      norm(x - y)^2  =  sum over k of the discarded weight of step k

The iteration improves the factors at fixed ranks, one leg at a time. With the other factors fixed, the error of a
projection is smallest where the core is largest, so the best factor k is

    U_k  =  the leading r[k] left singular vectors of the unfolding along leg k of  x times U_j^H along all legs j != k

and a sweep never raises the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._array_api import dtype_of, reshape
from tnlib._typing import Array, Caps
from tnlib.formats.tucker.format import Tucker
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram import adjoint_times
from tnlib.linalg.gram_svd import LeftSVD, left_svd
from tnlib.linalg.multilinear import mode_product
from tnlib.linalg.orthogonal import complete_columns, qr_positive
from tnlib.linalg.truncation import TruncationBudget


def st_hosvd(
    x: Array,
    size: float,
    rtol: float | None,
    max_rank: Caps,
    bases: Sequence[Array | None] | None = None,
    *,
    dtype: np.dtype[Any] | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Array, list[Array], TruncationBudget]:
    """Return the core (r[0], ...) and orthonormal factors (n[k], r[k]) of `x` (n[0], ...), in range and of norm `size`.

    The result is in double precision, that of arrays of other libraries in their own. With `bases`, orthonormal columns
    (N[k], n[k]) that `x` holds coordinates in, the factors are (N[k], r[k]), and their signs and bases are fixed there.
    `dtype` and `shape` are those of the original array, if they differ from those of its coordinates.
    """
    shape, dtype = shape or x.shape, dtype or dtype_of(x)
    sides = [min(n, math.prod(shape) // n) for n in shape]
    budget = TruncationBudget(size, rtol, sides, dtype, max_rank)
    core, factors = x, []
    for k in range(x.ndim):
        slabs = unfold_slabs(core, k)
        svd, rank = _truncated_svd(slabs, budget)
        u, s = svd.u[:, :rank], svd.s[:rank]
        basis = None if bases is None else bases[k]
        columns = u if basis is None else basis @ u  # Nk [nk] rk
        change = canonical_basis_change(columns, s, dtype, squared=svd.error_estimate > 0.0)
        factors.append(change.columns(columns))
        core = adjoint_times(change.columns(u), slabs)  # (r0 ...) rk [nk] (n(k+1) ...)
        core = reshape(core, (*(factor.shape[1] for factor in factors), *x.shape[k + 1 :]))
    return core, factors, budget


def unfold_slabs(x: Array, k: int) -> Array:
    """Return `x` as (n[0] ... n[k-1], n[k], n[k+1] ...), without a copy where it is contiguous."""
    return reshape(x, (math.prod(x.shape[:k]), x.shape[k], -1))  # type: ignore[no-any-return]


def _truncated_svd(slabs: Array, budget: TruncationBudget) -> tuple[LeftSVD, int]:
    """Return left singular vectors of the middle leg of (l, n, m), and the rank within the budget."""
    # Singular values from one Gram matrix, where their error estimate leaves the rank and the error certain.
    svd = left_svd(slabs, exact=False)
    if budget.admits(svd.error_estimate):
        with budget.trial() as trial:
            rank = budget.truncate(svd.s, error_estimate=svd.error_estimate)
            if trial.is_resolved(svd.error_estimate):
                trial.commit()
                return svd, rank
    svd = left_svd(slabs, exact=True)
    return svd, budget.truncate(svd.s)


def orthogonal_iteration(x: Array, factors: Sequence[Array], n_iter: int) -> tuple[Array, list[Array]]:
    """Return the core and the orthonormal factors (n[k], r[k]) after `n_iter` sweeps over the legs of `x`."""
    factors = list(factors)
    partial = x
    for _ in range(n_iter):
        for k, factor in enumerate(factors):
            partial = x
            for j, other in enumerate(factors):
                if j != k:
                    partial = mode_product(partial, other.conj().T, j)  # r0 ... nk ... rj [nj] ...
            factors[k] = _leading_columns(unfold_slabs(np.ascontiguousarray(partial), k), factor.shape[1])
    core = mode_product(partial, factors[-1].conj().T, x.ndim - 1)  # r0 ... r(d-1) [n(d-1)]
    return np.ascontiguousarray(core), factors


def orthonormal_factors(value: Tucker) -> list[Array]:
    """Return orthonormal bases (n[k], r[k]) of the columns of the factors, in double precision."""
    return [qr_positive(factor.astype(np.result_type(factor, np.float64)))[0] for factor in value.factors]


def _leading_columns(slabs: Array, rank: int) -> Array:
    """Return `rank` left singular vectors of the middle leg of (l, n, m), completed where l m is smaller."""
    svd = left_svd(slabs, exact=True)
    u, s = svd.u[:, :rank], svd.s[:rank]
    columns = canonical_basis_change(u, s, slabs.dtype).columns(u).astype(slabs.dtype, copy=False)
    return columns if columns.shape[1] == rank else complete_columns(columns, rank)
