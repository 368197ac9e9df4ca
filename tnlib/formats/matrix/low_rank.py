"""The LowRank format: a matrix as the product of a tall and a wide one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._fit import wrong_type
from tnlib._format import LinearFormat, Operator
from tnlib._stored_arrays import as_stored, refuse_too_large, set_fields
from tnlib._typing import Array
from tnlib._validate import as_real
from tnlib.linalg.canonical_basis import group_basis_change
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import column_exponents, norm, shift
from tnlib.linalg.thin_svd import product_svd
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import noise_level, numerical_rank


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(LinearFormat, Operator):
    """The matrix left @ right, of rank at most r.

    Parameters
    ----------
    left
        (m, r).
    right
        (r, n). For a product :math:`A B^T` pass ``B.T``.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.LowRank(np.ones((100, 2)), np.ones((2, 50)))
    >>> a.shape, a.n_parameters, round(a.norm(), 3)
    ((100, 50), 300, 141.421)
    """

    left: Array
    right: Array

    def __post_init__(self) -> None:
        left = as_stored("LowRank", "left", self.left, ndim=2)
        right = as_stored("LowRank", "right", self.right, ndim=2)
        if left.shape[1] != right.shape[0]:
            raise ArgumentError(
                f"LowRank: left (m, r) and right (r, n) must share r, got shapes {left.shape} and {right.shape}; "
                "for a product A B^T pass B.T as right."
            )
        set_fields(self, left=left, right=right)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (m, n) of the product."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The one inner size, (r,)."""
        return (self.left.shape[1],)

    @property
    def T(self) -> LowRank:
        """The transpose, ``right.T @ left.T``."""
        return LowRank(self.right.T, self.left.T)

    def _part(self, *, imaginary: bool) -> LowRank:
        """Return left @ Re(right) + left @ Im(right), of real left factors: the rank doubles."""
        left = [self.left.imag, self.left.real] if imaginary else [self.left.real, -self.left.imag]
        return LowRank(np.concatenate(left, axis=1), np.concatenate([self.right.real, self.right.imag]))

    @overload
    def __matmul__(self, x: LowRank) -> LowRank: ...
    @overload
    def __matmul__(self, x: Array) -> Array: ...
    def __matmul__(self, x: Any) -> Any:
        """Multiply with a LowRank, at the smaller of both ranks, or with a dense array."""
        if not isinstance(x, LowRank):
            return super().__matmul__(x)
        if self.shape[1] != x.shape[0]:
            raise ArgumentError(
                f"LowRank @ LowRank: the inner legs must have one size, got {self.shape[1]} and {x.shape[0]}; "
                "transpose one of them."
            )
        between = self.right @ x.left  # r [n] s
        if self.ranks[0] <= x.ranks[0]:
            return LowRank(self.left, between @ x.right)
        return LowRank(self.left @ between, x.right)

    def _multiplied(self, number: Any) -> LowRank:
        return LowRank(number * self.left, self.right)

    def _added(self, other: LowRank) -> LowRank:
        left = np.concatenate([self.left, other.left], axis=1)
        return LowRank(left, np.concatenate([self.right, other.right], axis=0))

    def full(self) -> Array:
        """Contract to the dense matrix (m, n)."""
        refuse_too_large(self)
        return self.left @ self.right  # m [r] n

    def norm(self) -> float:
        """Frobenius norm, from the triangular factors of both sides: no (m, n) array and no cancellation."""
        return norm(r_factor(self.left) @ r_factor(self.right.T).T)

    def _matmat(self, x: Array) -> Array:
        return np.asarray(self.left @ (self.right @ x))  # m [r] [n] k

    def _rmatmat(self, x: Array) -> Array:
        return np.asarray((x.conj().T @ self.left @ self.right).conj().T)  # n [r] [m] k, without a copy of a factor


@single_threaded_blas
def balance(t: LowRank, *, power: float = 0.5) -> LowRank:
    """Return the same product with the factors :math:`U S^p` and :math:`S^{1 - p} V^H` of its SVD, p being `power`.

    The result depends on the product only, not on the given factors. The query and key weights of an attention head are
    such a product. To balance several products A B with a common B, stack the rows of the matrices A.

    Parameters
    ----------
    t
        The product, with factors of any norm and any rank. The dense matrix is never formed.
    power
        Power of the singular values S in the left factor. 1/2: balanced, :math:`L^H L = R R^H = S` with the factors L
        and R, the smallest sum of squares of all splits. 0: `left` has orthonormal columns. 1: `right` has orthonormal
        rows.

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
