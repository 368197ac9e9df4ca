"""The CP format: a weighted sum of rank-one tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._format import LinearFormat
from tnlib._stored_arrays import as_stored, as_stored_list, refuse_too_large, set_fields
from tnlib._typing import Array
from tnlib.linalg.multilinear import khatri_rao
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import column_exponents, norm, shift

_MOST_COMPLEX_FACTORS = 12  # of a CP that is split into real and imaginary part: 2048 times as many terms


@dataclass(frozen=True, eq=False, repr=False)
class CP(LinearFormat):
    """The sum over j of weights[j] times the outer product of the j-th columns.

    Parameters
    ----------
    weights
        (R,).
    factors
        Factor k of shape (n[k], R).

    References
    ----------
    F. L. Hitchcock, "The expression of a tensor or a polyadic as a sum of products", Journal of Mathematics and Physics
    6 (1927); T. G. Kolda, B. W. Bader, "Tensor decompositions and applications", SIAM Review 51 (2009), section 3.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> t = tnlib.CP([2.0], [np.ones((10, 1)), np.ones((20, 1)), np.ones((30, 1))])
    >>> t.shape, t.n_parameters, float(t.full()[0, 0, 0])
    ((10, 20, 30), 61, 2.0)
    """

    weights: Array
    factors: Sequence[Array]

    def __post_init__(self) -> None:
        factors = as_stored_list("CP", "factor", self.factors, ndim=2)
        weights = as_stored("CP", "weights", self.weights, ndim=1)
        for k, factor in enumerate(factors):
            if factor.shape[1] != len(weights):
                raise ArgumentError(
                    f"CP: factor {k} must have {len(weights)} columns, one per weight, got shape {factor.shape}; "
                    "factors are (n, R)."
                )
        set_fields(self, weights=weights, factors=factors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the legs."""
        return tuple(len(factor) for factor in self.factors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of components, (R,)."""
        return self.weights.shape

    def _part(self, *, imaginary: bool) -> CP:
        """Expand every product of c complex columns a + ib into products of real columns, 2**(c-1) for each part.

        A product of m imaginary parts has the coefficient i**m: an even m is real, an odd one imaginary.
        """
        n_complex = sum(np.iscomplexobj(factor) for factor in self.factors)
        if n_complex > _MOST_COMPLEX_FACTORS:
            raise ArgumentError(
                f"CP.{'imag' if imaginary else 'real'}: the CP must have at most {_MOST_COMPLEX_FACTORS} complex "
                f"factors, got {n_complex}, and the terms double with each; convert it to a TensorTrain first."
            )
        weights, (first, *others) = self.weights, self.factors
        if np.iscomplexobj(weights):
            e = column_exponents(weights[None]) - 1  # weights in [1, 2) times 2**e, so that products stay in range
            first, weights = first * shift(weights, -e), shift(np.ones(len(e), weights.real.dtype), e)
        factors = [first, *others]
        choices = itertools.product(*((np.real, np.imag)[: 1 + np.iscomplexobj(factor)] for factor in factors))
        terms = [parts for parts in choices if parts.count(np.imag) % 2 == imaginary]
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
        """Frobenius norm, from the triangular factor of the Khatri-Rao product, without loss of digits by squaring."""
        *others, last = self.factors
        small = np.ones((1, len(self.weights)), last.dtype)
        for factor in others:
            small = r_factor(khatri_rao([small, factor]))  # r R
        return norm((small * self.weights) @ last.T)  # r [R] n(d-1)
