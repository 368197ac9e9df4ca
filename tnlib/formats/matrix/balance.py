r"""Gauges of a product A B: A G and G^-1 B for any invertible G.

The product has an SVD, U S V^H, that does not depend on G. Distributed as A = U S^p and B = S^(1-p) V^H, it is

    p = 1/2   balanced: A^H A = B B^H = S, the split of the smallest norm(A)^2 + norm(B)^2
    p = 0     A isometric, the columns of A orthonormal
    p = 1     B isometric, the rows of B orthonormal

and phases, and bases of equal singular values, are fixed on the left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._fit import wrong_type
from tnlib._typing import Array
from tnlib._validate import as_real
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.linalg.canonical_basis import group_basis_change
from tnlib.linalg.scaling import column_exponents, norm, shift
from tnlib.linalg.thin_svd import product_svd
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import noise_level, numerical_rank


@single_threaded_blas
def balance(t: LowRank, *, power: float = 0.5) -> LowRank:
    """Return the same product with the factors U S^power and S^(1 - power) V^H of its SVD.

    The result depends on the product only, not on the given factors. The query and key weights of an attention head are
    such a product. To balance several products A B with a common B, stack the rows of the matrices A.

    Parameters
    ----------
    t
        The product, with factors of any norm and any rank. The dense matrix is never formed.
    power
        Power of the singular values S in the left factor. 1/2: balanced, left^H left = right right^H = diag(S), the
        smallest sum of squares of all splits. 0: `left` has orthonormal columns. 1: `right` has orthonormal rows.

    Returns
    -------
    LowRank
        At the numerical rank. Columns of `left` are in the order of descending S, with fixed signs and fixed bases of
        equal values. The SVD itself is `tnlib.convert(t, tnlib.SVD)`.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> balanced = tnlib.balance(tnlib.LowRank([[8.0], [0.0]], [[0.5, 0.0]]))
    >>> balanced.left[:, 0], balanced.right[0]
    (array([2., 0.]), array([2., 0.]))
    """
    if not isinstance(t, LowRank):
        raise wrong_type("balance", "t", "a LowRank", t, "pass tnlib.LowRank(A, B.T) for A B^T")
    power = as_real("balance", "power", power, "power=0.5")
    if not 0.0 <= power <= 1.0:
        raise ArgumentError(f"balance: power must lie between 0 and 1, got {power}; 0.5 is balanced.")
    with np.errstate(over="ignore"):  # the format refuses what leaves the range of its dtype
        return LowRank(*distribute(*truncated_product_svd(*t.promoted_arrays()), power))


def truncated_product_svd(left: Array, right: Array) -> tuple[Array, Array, Array, int]:
    """Return u, s, vh of left (m, r) @ right (r, n) at its numerical rank, and e: s is 2**e times too small."""
    u, s, vh, exponent = scaled_product_svd(left, right)
    rank = numerical_rank(s, noise_level(norm(s), s.dtype, min(len(u), vh.shape[1])))
    return u[:, :rank], s[:rank], vh[:rank], exponent


def scaled_product_svd(left: Array, right: Array) -> tuple[Array, Array, Array, int]:
    """Return u, s, vh of left (m, r) @ right (r, n), and e: s is 2**e times too small; any scale per inner index."""
    e, f = column_exponents(left), column_exponents(right.T)
    nonzero = (np.abs(left).max(axis=0) > 0) & (np.abs(right).max(axis=1) > 0)
    top = int((e + f)[nonzero].max()) if nonzero.any() else 0
    below = np.where(nonzero, e + f - top, 0)  # at most 0: a term that underflows is negligible beside the largest
    return *product_svd(shift(left, -e), shift(right.T, below - f).T), top


def distribute(
    u: Array, s: Array, vh: Array, exponent: int, power: float, groups: Sequence[slice] | None = None
) -> tuple[Array, Array]:
    """Return A = u S^power and B = S^(1 - power) vh with S = 2**exponent diag(s), in canonical bases of `groups`."""
    left, right = u * s**power, s[:, None] ** (1.0 - power) * vh
    if groups:
        change = group_basis_change(u, groups)
        left, right = change.columns(left), change.rows(right)
    to_left = math.floor(exponent * power)
    factor = s.dtype.type(2.0 ** (exponent * power - to_left))
    return shift(left * factor, to_left), shift(right / factor, exponent - to_left)
