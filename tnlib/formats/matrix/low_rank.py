"""The LowRank format: a matrix as the product of a tall and a wide one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._format import LinearFormat, Operator, as_stored, refuse_too_large, set_fields
from tnlib._typing import Array
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import norm


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(LinearFormat, Operator):
    """The matrix left @ right, of rank at most r.

    Parameters
    ----------
    left
        (m, r).
    right
        (r, n). For a product A B^T pass B.T.

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
        """The transpose, right^T @ left^T."""
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
