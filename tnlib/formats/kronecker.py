"""A sum of Kronecker products: the form of frozen attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import to_numpy
from tnlib.formats.base import Operator, as_stored, as_stored_list
from tnlib.formats.low_rank import LowRank
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.scale import norm


def _as_right(right: Any) -> tuple[Array | LowRank, ...]:
    if not isinstance(right, Sequence | np.ndarray) or len(right) == 0:
        raise ArgumentTypeError(
            f"KroneckerTerms: right must be a non-empty sequence of matrices, got {type(right).__name__}; pass a list."
        )
    if all(isinstance(term, LowRank) for term in right):
        return tuple(right)
    dense = [term.full() if isinstance(term, LowRank) else term for term in right]
    return as_stored_list("KroneckerTerms", lambda h: f"right {h}", dense, ndim=2)


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerTerms(Operator):
    """The operator sum_h left[h] (x) right[h], acting on arrays x of shape (positions, features).

    (A (x) B) x = A x B^T; on x flattened row by row it is the matrix kron(A, B).

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
        dense = np.stack([np.asarray(term) for term in self.right])
        out: Array = np.einsum("hij,hkl->ikjl", self.left, dense)  # p q p' q'
        return out.reshape(self.shape)

    def norm(self) -> float:
        r"""Frobenius norm without cancellation.

        With the left matrices as columns, L = Q T and T upper triangular, the terms become orthogonal on the left:
        norm^2 = sum_i norm(sum_h T[i, h] right[h])^2, each inner sum one matrix, or one pair of stacked factors.
        """
        t = triangle(self.left.reshape(len(self.left), -1).T)  # i h
        return norm(np.array([_norm_of_sum(row, self.right) for row in t]))

    def _matmat(self, x: Array) -> Array:
        columns = np.ascontiguousarray(x.T).reshape(-1, self.left.shape[2], self.right[0].shape[1])  # k p' q'
        return self._apply(columns).reshape(len(columns), -1).T

    def _rmatmat(self, x: Array) -> Array:
        return self.H._matmat(x)

    @property
    def H(self) -> KroneckerTerms:
        """The adjoint, term by term."""
        right = [
            term.H if isinstance(term, LowRank) else term.conj().T  # q' q
            for term in self.right
        ]
        return KroneckerTerms(self.left.conj().transpose(0, 2, 1), tuple(right))

    def _apply(self, x: Array) -> Array:
        (_, p, _), (q, _) = self.left.shape, self.right[0].shape
        out = np.zeros((len(x), p, q), np.result_type(self.dtype, x))
        for a, b in zip(self.left, self.right, strict=True):
            # x B^T first: for a LowRank B = left right that is (x right^T) left^T
            moved = (x @ b.right.T) @ b.left.T if isinstance(b, LowRank) else x @ b.T  # k p' q
            out += a @ moved  # k p [p'] q
        return out


def _arrays(term: Array | LowRank) -> tuple[Array, ...]:
    return term.arrays() if isinstance(term, LowRank) else (term,)


def _norm_of_sum(coefficients: Array, terms: Sequence[Array | LowRank]) -> float:
    """Return norm(sum_h coefficients[h] terms[h])."""
    factored = [term for term in terms if isinstance(term, LowRank)]
    if not factored:
        return norm(np.tensordot(coefficients, np.stack(terms), axes=1))
    left = np.concatenate([c * term.left for c, term in zip(coefficients, factored, strict=True)], axis=1)
    right = np.concatenate([term.right for term in factored], axis=0)
    return LowRank(left, right).norm()
