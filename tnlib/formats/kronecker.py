"""A sum of Kronecker products: the form of frozen attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ldexp
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import is_list, to_numpy
from tnlib.formats.base import Operator, as_stored, refuse_too_large
from tnlib.formats.linear import Linear
from tnlib.formats.low_rank import LowRank
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.scale import norm
from tnlib.linalg.terms import terms_in_range, terms_triangle


def _as_right(right: Any) -> tuple[Array | LowRank, ...]:
    if not is_list(right) or len(right) == 0:
        raise ArgumentTypeError(
            f"KroneckerTerms: right must be a non-empty sequence of matrices, got {type(right).__name__}; pass a list."
        )
    return tuple(
        term if isinstance(term, LowRank) else as_stored("KroneckerTerms", f"right {h}", term, ndim=2)
        for h, term in enumerate(right)
    )


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerTerms(Linear, Operator):
    """The operator sum_h left[h] (x) right[h], acting on arrays x of shape (positions, features).

    (A (x) B) x = A x B^T; on x flattened row by row it is the matrix kron(A, B). Sums, products, multiples and adjoints
    are of the same form: (A2 (x) B2)(A1 (x) B1) = A2 A1 (x) B2 B1, so a product has a term for every pair.
    `tnlib.round` finds the fewest terms.

    Parameters
    ----------
    left
        (H, p, p'), one matrix per term on the positions.
    right
        H matrices (q, q') on the features, arrays or `LowRank`.

    Raises
    ------
    ArgumentError
        If the counts or the shapes of the terms differ.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> k = tnlib.KroneckerTerms(np.eye(3)[None], [tnlib.LowRank(np.ones((4, 1)), np.ones((1, 4)))])
    >>> k.shape, k.n_parameters, float(k.apply(np.ones((3, 4)))[0, 0])
    ((12, 12), 17, 4.0)
    """

    left: Array
    right: Sequence[Array | LowRank]

    def __post_init__(self) -> None:
        left = as_stored("KroneckerTerms", "left", self.left, ndim=3)
        right = _as_right(self.right)
        if len(left) != len(right):
            raise ArgumentError(
                f"KroneckerTerms: left and right must have as many terms, got {len(left)} and {len(right)}; "
                "pass one matrix on each side per term."
            )
        for h, term in enumerate(right):
            if term.shape != right[0].shape:
                raise ArgumentError(
                    f"KroneckerTerms: all right matrices must have one shape, got {right[0].shape} for term 0 and "
                    f"{term.shape} for term {h}; pad them."
                )
        object.__setattr__(self, "left", left)
        object.__setattr__(self, "right", right)

    def arrays(self) -> tuple[Array, ...]:
        """Return left, then the arrays of every right matrix."""
        return (self.left, *(a for term in self.right for a in _arrays(term)))

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (p q, p' q') as a matrix on flattened arrays."""
        (_, p, p_in), (q, q_in) = self.left.shape, self.right[0].shape
        return p * q, p_in * q_in

    @property
    def ranks(self) -> tuple[int, ...]:
        """The count of terms, (H,)."""
        return (len(self.left),)

    def apply(self, x: Array) -> Array:
        """Return sum_h left[h] x right[h]^T, (p, q), for x (p', q'); nothing of size (p q)^2 is formed."""
        x = to_numpy("KroneckerTerms.apply", "x", x)
        expected = self.left.shape[2], self.right[0].shape[1]
        if x.shape != expected:
            raise ArgumentError(
                f"KroneckerTerms.apply: x must have shape (positions, features) = {expected}, got {x.shape}; "
                "positions come first."
            )
        y: Array = self._apply(x[None])[0]
        return y

    def full(self) -> Array:
        """Multiply out to the matrix (p q, p' q')."""
        refuse_too_large(self)
        dense = np.stack([np.asarray(term) for term in self.right])
        out: Array = np.einsum("hij,hkl->ikjl", self.left, dense)  # p q p' q'
        return out.reshape(self.shape)

    def norm(self) -> float:
        r"""Frobenius norm without cancellation.

        With the left matrices as columns, L = Q T, and the right ones, R = P S, the operator is L R^T, and its norm
        that of T S^T, with a row and a column per term.
        """
        left, right, twos = terms_in_range(self.left, [_arrays(term) for term in self.right])
        t, s = triangle(left.reshape(len(left), -1).T), terms_triangle(right)  # i h, j h
        return ldexp(norm(t @ s.T), twos)

    def _matmat(self, x: Array) -> Array:
        columns = np.ascontiguousarray(x.T).reshape(-1, self.left.shape[2], self.right[0].shape[1])  # k p' q'
        return self._apply(columns).reshape(len(columns), -1).T

    def _rmatmat(self, x: Array) -> Array:
        return self.H._matmat(x)

    @property
    def T(self) -> KroneckerTerms:
        """The transpose, term by term."""
        return KroneckerTerms(self.left.transpose(0, 2, 1), tuple(term.T for term in self.right))

    @property
    def H(self) -> KroneckerTerms:
        """The adjoint, term by term."""
        return self.T.conj()

    def conj(self) -> KroneckerTerms:
        """Return the complex conjugate."""
        return KroneckerTerms(self.left.conj(), tuple(term.conj() for term in self.right))

    def __matmul__(self, x: Any) -> Any:
        """Multiply with KroneckerTerms, a term for every pair of terms, or with a dense array."""
        if not isinstance(x, KroneckerTerms):
            return super().__matmul__(x)
        inner, met = (self.left.shape[2], self.right[0].shape[1]), (x.left.shape[1], x.right[0].shape[0])
        if inner != met:
            raise ArgumentError(
                f"KroneckerTerms @ KroneckerTerms: the inner legs (positions, features) must have one size, got "
                f"{inner} and {met}; transpose one of them."
            )
        left = self.left[:, None] @ x.left  # h g p [p'] p"
        right = [_product(a, b) for a in self.right for b in x.right]
        return KroneckerTerms(left.reshape(-1, *left.shape[2:]), right)

    @property
    def _legs(self) -> tuple[int, ...]:
        (_, p, p_in), (q, q_in) = self.left.shape, self.right[0].shape
        return p, q, p_in, q_in

    def _times(self, number: Any) -> KroneckerTerms:
        return KroneckerTerms(number * self.left, self.right)

    def _plus(self, other: KroneckerTerms) -> KroneckerTerms:
        return KroneckerTerms(np.concatenate([self.left, other.left]), (*self.right, *other.right))

    def _apply(self, x: Array) -> Array:
        out = np.zeros((len(x), self.left.shape[1], self.right[0].shape[0]), np.result_type(self.dtype, x))
        for a, b in zip(self.left, self.right, strict=True):
            if isinstance(b, LowRank):
                out += _two_sided(a, x @ b.right.T, b.left.T)  # k p' [q'] r
            else:
                out += _two_sided(a, x, b.T)
        return out


def _two_sided(a: Array, x: Array, b: Array) -> Array:
    """Return a x[k] b for a (p, p'), x (k, p', s) and b (s, q), in the cheaper order."""
    (p, p_in), (s, q) = a.shape, b.shape
    if p_in * q * (s + p) <= p * s * (p_in + q):
        return np.asarray(a @ (x @ b))  # k p [p'] [s] q
    return np.asarray((a @ x) @ b)


def _arrays(term: Array | LowRank) -> tuple[Array, ...]:
    return term.arrays() if isinstance(term, LowRank) else (term,)


def _product(a: Array | LowRank, b: Array | LowRank) -> Array | LowRank:
    """Return a @ b, as factors where one of the two is."""
    if isinstance(a, LowRank) and not isinstance(b, LowRank):
        return LowRank(a.left, a.right @ b)
    if isinstance(b, LowRank) and not isinstance(a, LowRank):
        return LowRank(a @ b.left, b.right)
    product: Array | LowRank = a @ b
    return product
