"""A matrix held as a product, in a gauge of its inner leg."""

from __future__ import annotations

import numbers

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib.formats.low_rank import LowRank
from tnlib.gauge.bilinear import product_in_range, share_out
from tnlib.linalg.threads import own_threads


@own_threads
def balance(value: LowRank, *, power: float = 0.5) -> LowRank:
    """Return the same product in the one gauge that does not depend on how it was split: U S^power, S^(1 - power) V^H.

    A product A B^T does not know (A G) (B G^-T)^T from it, for any invertible G; the query and key maps of an attention
    head are such a pair. Several matrices that share one B, and with it one G, are one A: stack their rows.

    Parameters
    ----------
    value
        The product, of any scale on either side and any rank. It is never formed.
    power
        Of the singular values S, what the left factor takes. 1/2: balanced, left^H left = right right^H = diag(S), the
        smallest sum of squares of all splits. 0: `left` has orthonormal columns. 1: `right` has orthonormal rows.

    Returns
    -------
    LowRank
        At the numerical rank; columns of `left` in the order of S, descending, its signs and its bases of equal values
        fixed. The SVD itself is `tnlib.convert(value, tnlib.SVD)`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `value` is no LowRank, or `power` is not from 0 to 1.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> fixed = tnlib.balance(tnlib.LowRank([[8.0], [0.0]], [[0.5, 0.0]]))
    >>> fixed.left[:, 0], fixed.right[0]
    (array([2., 0.]), array([2., 0.]))
    """
    if not isinstance(value, LowRank):
        raise ArgumentTypeError(
            f"balance: value must be a LowRank, got a {type(value).__name__}; pass tnlib.LowRank(A, B.T) for A B^T."
        )
    if not isinstance(power, numbers.Real) or isinstance(power, bool):
        raise ArgumentTypeError(f"balance: power must be a real number, got {power!r}; pass for example power=0.5.")
    if not 0.0 <= power <= 1.0:
        raise ArgumentError(f"balance: power must lie between 0 and 1, got {power}; 0.5 is balanced.")
    left, right = (a.astype(value.dtype, copy=False) for a in value.arrays())
    with np.errstate(over="ignore"):  # the format refuses what leaves the range of its dtype
        return LowRank(*share_out(*product_in_range(left, right), float(power)))
