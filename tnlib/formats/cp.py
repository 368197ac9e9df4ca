"""The CP format: a weighted sum of rank-one tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.base import as_stored, as_stored_list, refuse_too_large
from tnlib.formats.linear import Linear
from tnlib.linalg.modes import khatri_rao
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.scale import norm


@dataclass(frozen=True, eq=False, repr=False)
class CP(Linear):
    """The sum over j of weights[j] times the outer product of the j-th columns.

    Parameters
    ----------
    weights
        (R,).
    factors
        Factor k of shape (n[k], R).

    Raises
    ------
    ArgumentError
        If the factors and the weights do not count the same components.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> t = tnlib.CP(np.array([2.0]), [np.ones((10, 1)), np.ones((20, 1)), np.ones((30, 1))])
    >>> t.shape, t.n_parameters, float(t.full()[0, 0, 0])
    ((10, 20, 30), 61, 2.0)
    """

    weights: Array
    factors: Sequence[Array]

    def __post_init__(self) -> None:
        factors = as_stored_list("CP", lambda k: f"factor {k}", self.factors, ndim=2)
        weights = as_stored("CP", "weights", self.weights, ndim=1)
        for k, factor in enumerate(factors):
            if factor.shape[1] != len(weights):
                raise ArgumentError(
                    f"CP: factor {k} must have {len(weights)} columns, one per weight, got shape {factor.shape}; "
                    "factors are (n, R)."
                )
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "factors", factors)

    def arrays(self) -> tuple[Array, ...]:
        """Return the weights, then the factors."""
        return (self.weights, *self.factors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the legs."""
        return tuple(len(factor) for factor in self.factors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The one rank, (R,)."""
        return self.weights.shape

    def conj(self) -> CP:
        """Return the complex conjugate."""
        return CP(self.weights.conj(), tuple(factor.conj() for factor in self.factors))

    def _times(self, number: Any) -> CP:
        return CP(number * self.weights, self.factors)

    def _plus(self, other: CP) -> CP:
        pairs = zip(self.factors, other.factors, strict=True)
        weights = np.concatenate([self.weights, other.weights])
        return CP(weights, tuple(np.concatenate(pair, axis=1) for pair in pairs))

    def _constant(self, number: Any) -> CP:
        ones = tuple(np.ones((n, 1), self.dtype) for n in self.shape)
        return CP(np.ones(1, self.dtype), ones)._times(number)

    def full(self) -> Array:
        """Multiply out to the dense array."""
        refuse_too_large(self)
        first, *others = self.factors
        rest = khatri_rao(others) if others else np.ones((1, len(self.weights)), first.dtype)
        return ((first * self.weights) @ rest.T).reshape(self.shape)  # n0 [R] (n1 ...)

    def norm(self) -> float:
        """Frobenius norm, from the triangular factor of the Khatri-Rao product: no square that would lose digits."""
        *others, last = self.factors
        small = np.ones((1, len(self.weights)), last.dtype)
        for factor in others:
            small = triangle(khatri_rao([small, factor]))  # r R
        return norm((small * self.weights) @ last.T)  # r n(d-1)
