"""Alternating least squares for the CP format of an array with missing entries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.formats.cp.als import Iterate, unit_columns
from tnlib.linalg.missing_entries import residual_of_known
from tnlib.linalg.multilinear import khatri_rao, solve_gram, unfold

_BLOCK = 1 << 22  # numbers in a block of products of columns


def als_of_known_entries(
    known: Array, x: Array, factors: Sequence[Array], *, n_iter: int, target: float, slow: float
) -> Iterate:
    """Minimize norm(x - y) over the `known` entries; `x` is zero elsewhere, factors are (n[k], R).

    With K the Khatri-Rao product of the other factors, row i of factor k solves least squares over the known entries m
    of slice i alone, a R x R system per row:

        a_i  (sum over known m of K_m^T conj(K_m))  =  sum over known m of x_im conj(K_m)

    So no sweep raises the residual. The iteration ends as that of `als` (G. Tomasi, R. Bro, "PARAFAC and missing
    values", Chemometrics Intell. Lab. Syst. 75 (2005)).
    """
    factors, previous = list(factors), np.inf
    for sweep in range(1, n_iter + 1):
        before = factors[:]
        for k in range(x.ndim):
            factors[k] = _solve(unfold(x, k), unfold(known, k), khatri_rao(factors[:k] + factors[k + 1 :]))
            if k < x.ndim - 1:  # the last factor carries the weights
                factors[k] = unit_columns(factors[k])
        residual = residual_of_known(x, known, cp_array(factors))
        if residual > previous:  # by rounding alone
            return Iterate(before, previous, sweep, True)
        if residual <= target or previous - residual <= slow * residual:
            return Iterate(factors, residual, sweep, True)
        previous = residual
    return Iterate(factors, previous, n_iter, False)


def cp_array(factors: Sequence[Array]) -> Array:
    """Return the dense array of the CP with these factors (n[k], R)."""
    product = factors[0] @ khatri_rao(factors[1:]).T  # n0 [R] (n1 ...)
    return product.reshape([len(factor) for factor in factors])


def _solve(x: Array, known: Array, others: Array) -> Array:
    """Return the factor (n, R) from unfoldings (n, M) and the Khatri-Rao product (M, R) of the other factors."""
    rank = others.shape[1]
    grams = np.zeros((len(x), rank * rank), others.dtype)
    step = max(1, _BLOCK // rank**2)
    for start in range(0, len(others), step):
        block = others[start : start + step]
        products = (block[:, :, None] * block.conj()[:, None, :]).reshape(len(block), -1)  # m (R R)
        grams += known[:, start : start + step].astype(products.dtype) @ products
    projected = x @ others.conj()  # n [M] R
    rows = [solve_gram(p[None], g.reshape(rank, rank)) for p, g in zip(projected, grams, strict=True)]
    return np.concatenate(rows)
