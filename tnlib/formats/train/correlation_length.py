"""Correlation length of a uniform train."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.linalg.eigenvalues import leading_moduli
from tnlib.linalg.scaling import norm


def correlation_length(core: npt.ArrayLike) -> float:
    """Return the correlation length, in sites, of the uniform train that repeats `core`.

    Correlations fall as exp(-distance / length), length = -1 / log|e[1] / e[0]|, of the two largest eigenvalues in
    modulus of the transfer matrix sum over n of conj(A[:, n]) (x) A[:, n]. It is 0 for a product state, and inf if the
    two eigenvalues have the same modulus, as for a GHZ state. If too many eigenvalues are close in modulus to be
    separated, ArgumentError is raised.

    Parameters
    ----------
    core
        (r, n, r), in any gauge and of any norm.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> mix = np.sqrt(np.array([[0.9, 0.1], [0.1, 0.9]]))  # a classical chain that flips once in ten sites
    >>> f"{tnlib.correlation_length(mix[:, :, None] * np.eye(2)):.4f}, {-1 / np.log(0.8):.4f}"
    '4.4814, 4.4814'
    """
    a = as_array("correlation_length", "core", core, ndim=3)
    if a.shape[0] != a.shape[-1]:
        raise ArgumentError(
            f"correlation_length: core must have equal first and last legs, got shape {a.shape}; pass one unit cell."
        )
    a = a.astype(np.result_type(a, np.float64)) / (norm(a) or 1.0)
    r = len(a)

    def transfer(x: Array) -> Array:
        right = np.tensordot(a, x.reshape(r, r), ([2], [1]))  # c n [d] b
        return np.tensordot(a.conj(), right, ([1, 2], [1, 2])).reshape(-1)  # a [n] [b] c

    try:
        # A product of 2 r - 1 nilpotent r x r matrices on either side of x vanishes.
        first, second = leading_moduli(transfer, r * r, a.dtype, count=2, nilpotency_bound=2 * r - 1)
    except np.linalg.LinAlgError:
        raise ArgumentError(
            "correlation_length: core must have a transfer matrix with a leading eigenvalue, got one without; "
            "block several sites to one."
        ) from None
    if second <= np.finfo(np.float64).eps * first:
        return 0.0
    ratio = float(second / first)
    return math.inf if ratio >= 1.0 - 1e-12 else -1.0 / math.log(ratio)
