"""CP with constraints on the factors, by the iterations of tensorly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.modes import khatri_rao
from tnlib.linalg.project import residual_norm
from tnlib.sweeps.als import Iterate

# What tensorly's constrained_parafac calls them; non-negative factors have an iteration of their own.
CONSTRAINTS = {"nonnegative": "non_negative", "monotone": "monotonicity", "unimodal": "unimodality"}


def constrained(
    x: Array, factors: Sequence[Array], *, constraint: str, n_iter: int, slow: float, target: float
) -> Iterate:
    """Start from the moduli of a guess: non-negative by hierarchical least squares, the others by AO-ADMM."""
    from tensorly.cp_tensor import CPTensor
    from tensorly.decomposition import constrained_parafac, non_negative_parafac_hals

    rank = factors[0].shape[1]
    guess = CPTensor((np.ones(rank, x.dtype), [np.abs(factor).astype(x.dtype) for factor in factors]))
    if constraint == "nonnegative":
        found, errors = non_negative_parafac_hals(x, rank, n_iter_max=n_iter, init=guess, tol=slow, return_errors=True)
    else:
        asked = {CONSTRAINTS[constraint]: True}
        found, errors = constrained_parafac(
            x, rank, n_iter_max=n_iter, init=guess, tol_outer=slow, return_errors=True, **asked
        )
    weights, columns = found
    columns = [np.asarray(factor, x.dtype) for factor in columns]
    columns[-1] = columns[-1] * np.asarray(weights, x.dtype)
    half = x.ndim // 2
    left, right = khatri_rao(columns[:half]), khatri_rao(columns[half:])
    residual = residual_norm(x.reshape(len(left), -1), left, right.T)
    return Iterate(columns, residual, len(errors), len(errors) < n_iter or residual <= target)
