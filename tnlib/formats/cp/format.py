"""The CP format: a weighted sum of rank-one tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._format import LinearFormat, as_stored, as_stored_list, numbered, refuse_too_large
from tnlib._typing import Array
from tnlib.linalg.multilinear import khatri_rao
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import column_exponents, norm, shift


@dataclass(frozen=True, eq=False, repr=False)
class CP(LinearFormat):
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
        If the factors and the weights do not have the same number of components.

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

    def named_arrays(self) -> dict[str, Array]:
        """Return the weights and the factors."""
        return {"weights": self.weights} | {f"factors.{k}": factor for k, factor in enumerate(self.factors)}

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> CP:
        """Return the CP with these weights and factors."""
        return cls(arrays["weights"], numbered(arrays, "factors"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the legs."""
        return tuple(len(factor) for factor in self.factors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of components, (R,)."""
        return self.weights.shape

    def conj(self) -> CP:
        """Return the complex conjugate."""
        return CP(self.weights.conj(), tuple(factor.conj() for factor in self.factors))

    @property
    def real(self) -> CP:
        """The real part, of a real dtype, exact: 2**(c-1) R components, where c is the number of complex factors."""
        return self._with_real_factors(0) if self.dtype.kind == "c" else self

    @property
    def imag(self) -> CP:
        """The imaginary part, of a real dtype, exact: 2**(c-1) R components, where c counts complex factors."""
        return self._with_real_factors(1) if self.dtype.kind == "c" else self._multiplied(0)

    def _with_real_factors(self, parity: int) -> CP:
        """Expand every product of columns a + ib into 2**c products of real columns, m of them imaginary parts.

        A product has the coefficient i**m: those of even m make up the real part, those of odd m the imaginary part.
        """
        weights, (first, *others) = self.weights, self.factors
        if np.iscomplexobj(weights):
            e = column_exponents(weights[None]) - 1  # weights in [1, 2) times 2**e, so that products stay in range
            first, weights = first * shift(weights, -e), shift(np.ones(len(e), weights.real.dtype), e)
        factors = [first, *others]
        choices = itertools.product(*((np.real, np.imag)[: 1 + np.iscomplexobj(factor)] for factor in factors))
        terms = [parts for parts in choices if parts.count(np.imag) % 2 == parity]
        signs = [1 - 2 * (parts.count(np.imag) // 2 % 2) for parts in terms]  # of i**m: 1, i, -1, -i
        columns = (
            np.concatenate([part(factor) for part in parts], axis=1)
            for factor, parts in zip(factors, zip(*terms, strict=True), strict=True)
        )
        return CP(np.concatenate([sign * weights for sign in signs]), tuple(columns))

    def _multiplied(self, number: Any) -> CP:
        return CP(number * self.weights, self.factors)

    def _added(self, other: CP) -> CP:
        pairs = zip(self.factors, other.factors, strict=True)
        weights = np.concatenate([self.weights, other.weights])
        return CP(weights, tuple(np.concatenate(pair, axis=1) for pair in pairs))

    def _constant(self, number: Any) -> CP:
        ones = tuple(np.ones((n, 1), self.dtype) for n in self.shape)
        return CP(np.ones(1, self.dtype), ones)._multiplied(number)

    def full(self) -> Array:
        """Contract to the dense array (n[0], ..., n[d-1])."""
        refuse_too_large(self)
        first, *others = self.factors
        rest = khatri_rao(others) if others else np.ones((1, len(self.weights)), first.dtype)
        return ((first * self.weights) @ rest.T).reshape(self.shape)  # n0 [R] (n1 ...)

    def norm(self) -> float:
        """Frobenius norm, from the triangular factor of the Khatri-Rao product: no square that would lose digits."""
        *others, last = self.factors
        small = np.ones((1, len(self.weights)), last.dtype)
        for factor in others:
            small = r_factor(khatri_rao([small, factor]))  # r R
        return norm((small * self.weights) @ last.T)  # r [R] n(d-1)
