r"""Tucker decomposition of an array with missing entries: expectation-maximization with orthogonal iteration.

A sweep fills the missing entries of x with those of the approximation y, and takes a sweep of orthogonal iteration to
y'. With P the projection on the known entries,

    norm(P (x - y'))  <=  norm(filled - y')  <=  norm(filled - y)  =  norm(P (x - y))

so no sweep raises the error of the known entries.
"""

from __future__ import annotations

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._fit import roundoff
from tnlib._typing import Array
from tnlib.formats.tucker.format import Tucker
from tnlib.formats.tucker.st_hosvd import orthogonal_iteration, orthonormal_factors, st_hosvd
from tnlib.linalg.missing_entries import residual_of_known
from tnlib.linalg.scaling import prepare, restore, shift

_STATIONARY = 1e-6  # a sweep that lowers the error by less than this fraction of itself ends the iteration


def fit_known_entries(
    x: Array, known: Array, rtol: float | None, max_ranks: tuple[int | None, ...], n_iter: int, init: Tucker | None
) -> tuple[Tucker, float, int, bool]:
    """Fit the `known` entries of `x`, which is zero elsewhere, in at most `n_iter` sweeps, from zeros or `init`.

    Return the value, the relative error of the known entries, the number of sweeps, and True if they ended at a minimum
    or within the tolerance.
    """
    if max_ranks[0] is None:
        raise ArgumentError(
            "tucker: max_rank must be given for an array with missing entries, got None; the known entries alone do "
            "not determine it."
        )
    if n_iter == 0:
        raise ArgumentError(
            "tucker: n_iter must be at least 1 for an array with missing entries, got 0; pass for example n_iter=500."
        )
    scaled, exponent, size = prepare("tucker", "x", x)
    target = max(rtol or 0.0, roundoff(scaled.dtype)) * size
    if init is None:
        core, factors, _ = st_hosvd(scaled, size, None, max_ranks)
        filled = scaled
    else:
        core, factors = init.core, orthonormal_factors(init)
        filled = np.where(known, scaled, shift(init.full(), -exponent))
    residual, n_sweeps, stationary = np.inf, 0, False
    while n_sweeps < n_iter and not stationary:
        core, factors = orthogonal_iteration(filled, factors, 1)
        y = Tucker(core, tuple(factors)).full()
        previous, residual, n_sweeps = residual, residual_of_known(scaled, known, y), n_sweeps + 1
        stationary = residual <= target or previous - residual <= _STATIONARY * residual
        filled = np.where(known, scaled, y)
    value = Tucker(core.astype(scaled.dtype), tuple(factor.astype(scaled.dtype) for factor in factors))
    residual = residual_of_known(scaled, known, value.full())
    value = Tucker(restore("tucker", "x", value.core, exponent), value.factors)
    return value, residual / size if size > 0 else 0.0, n_sweeps, stationary
