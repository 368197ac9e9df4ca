"""CP with constraints on the factors, by the iterations of tensorly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.formats.cp.als import Iterate, cp_residual

# The keywords of tensorly's constrained_parafac; non-negative factors have an iteration of their own.
CONSTRAINTS = {"nonnegative": "non_negative", "monotone": "monotonicity", "unimodal": "unimodality"}


def constrained_cp(
    x: Array, factors: Sequence[Array], *, constraint: str, n_iter: int, slow: float, target: float
) -> Iterate:
    """Start from the moduli of `factors`: non-negative by hierarchical least squares, the others by AO-ADMM."""
    from tensorly.cp_tensor import CPTensor
    from tensorly.decomposition import constrained_parafac, non_negative_parafac_hals

    rank = factors[0].shape[1]
    start = CPTensor((np.ones(rank, x.dtype), [np.abs(factor).astype(x.dtype) for factor in factors]))
    if constraint == "nonnegative":
        cp, errors = non_negative_parafac_hals(x, rank, n_iter_max=n_iter, init=start, tol=slow, return_errors=True)
    else:
        keyword = {CONSTRAINTS[constraint]: True}
        cp, errors = constrained_parafac(
            x, rank, n_iter_max=n_iter, init=start, tol_outer=slow, return_errors=True, **keyword
        )
    weights, columns = cp
    columns = [np.asarray(factor, x.dtype) for factor in columns]
    columns[-1] = columns[-1] * np.asarray(weights, x.dtype)
    residual = cp_residual(x, columns)
    return Iterate(columns, residual, len(errors), len(errors) < n_iter or residual <= target)
