"""The Tucker format: a small core with one factor per leg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.base import as_stored, as_stored_list, refuse_too_large
from tnlib.formats.linear import Linear
from tnlib.linalg.modes import mode_product
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.scale import norm


@dataclass(frozen=True, eq=False, repr=False)
class Tucker(Linear):
    """A core multiplied along every leg by a factor.

    Parameters
    ----------
    core
        (r[0], ..., r[d-1]).
    factors
        Factor k of shape (n[k], r[k]).

    Raises
    ------
    ArgumentError
        If a factor does not fit its leg of the core.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> t = tnlib.Tucker(np.ones((1, 2)), [np.ones((10, 1)), np.ones((20, 2))])
    >>> t.shape, t.ranks, t.n_parameters
    ((10, 20), (1, 2), 52)
    """

    core: Array
    factors: Sequence[Array]

    def __post_init__(self) -> None:
        factors = as_stored_list("Tucker", lambda k: f"factor {k}", self.factors, ndim=2)
        core = as_stored("Tucker", "core", self.core, ndim=len(factors))
        for k, factor in enumerate(factors):
            if factor.shape[1] != core.shape[k]:
                raise ArgumentError(
                    f"Tucker: factor {k} must have {core.shape[k]} columns, one per entry of leg {k} of the core, "
                    f"got shape {factor.shape}; factors are (n, r)."
                )
        object.__setattr__(self, "core", core)
        object.__setattr__(self, "factors", factors)

    def arrays(self) -> tuple[Array, ...]:
        """Return the core, then the factors."""
        return (self.core, *self.factors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the outer legs."""
        return tuple(len(factor) for factor in self.factors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Multilinear ranks, the shape of the core."""
        return self.core.shape

    def conj(self) -> Tucker:
        """Return the complex conjugate."""
        return Tucker(self.core.conj(), tuple(factor.conj() for factor in self.factors))

    def _times(self, number: Any) -> Tucker:
        return Tucker(number * self.core, self.factors)

    def _plus(self, other: Tucker) -> Tucker:
        core = np.zeros(np.add(self.ranks, other.ranks), np.result_type(self.core, other.core))
        core[tuple(slice(r) for r in self.ranks)] = self.core
        core[tuple(slice(r, None) for r in self.ranks)] = other.core
        pairs = zip(self.factors, other.factors, strict=True)
        return Tucker(core, tuple(np.concatenate(pair, axis=1) for pair in pairs))

    def _constant(self, number: Any) -> Tucker:
        ones = tuple(np.ones((n, 1), self.dtype) for n in self.shape)
        return Tucker(np.ones((1,) * len(ones), self.dtype), ones)._times(number)

    def full(self) -> Array:
        """Multiply out to the dense array."""
        refuse_too_large(self)
        out = self.core
        for k, factor in enumerate(self.factors):
            out = mode_product(out, factor, k)  # n0 ... nk [rk] r(k+1) ...
        return np.ascontiguousarray(out)

    def norm(self) -> float:
        """Frobenius norm, from the triangular factor of every leg: nothing of full size, no cancellation."""
        small = self.core
        for k, factor in enumerate(self.factors):
            small = mode_product(small, triangle(factor), k)
        return norm(small)
