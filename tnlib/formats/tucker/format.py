"""The Tucker format: a small core with one factor per leg."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._array_api import contiguous, refuse_different_libraries
from tnlib._errors import ArgumentError
from tnlib._format import LinearFormat, numpy_arrays
from tnlib._stored_arrays import MAX_NDIM, as_stored, as_stored_list, refuse_too_large, set_fields
from tnlib._typing import Array
from tnlib._validate import as_list
from tnlib.linalg.multilinear import mode_product
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import norm

_LARGEST_CORE = 1 << 31  # entries


@dataclass(frozen=True, eq=False, repr=False)
class Tucker(LinearFormat):
    """A core multiplied along every leg by a factor.

    Parameters
    ----------
    core
        (r[0], ..., r[d-1]).
    factors
        Factor k of shape (n[k], r[k]).

    References
    ----------
    L. R. Tucker, "Some mathematical notes on three-mode factor analysis", Psychometrika 31 (1966); L. De Lathauwer, B.
    De Moor, J. Vandewalle, "A multilinear singular value decomposition", SIAM J. Matrix Anal. Appl. 21 (2000).

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
        refuse_different_libraries("Tucker", [self.core, *as_list("Tucker", "factors", self.factors, "arrays")])
        factors = as_stored_list("Tucker", "factor", self.factors, ndim=2, any_library=True)
        core = as_stored("Tucker", "core", self.core, ndim=len(factors), any_library=True)
        for k, factor in enumerate(factors):
            if factor.shape[1] != core.shape[k]:
                raise ArgumentError(
                    f"Tucker: factor {k} must have {core.shape[k]} columns, one per entry of leg {k} of the core, "
                    f"got shape {tuple(factor.shape)}; factors are (n, r)."
                )
        set_fields(self, core=core, factors=factors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the outer legs."""
        return tuple(factor.shape[0] for factor in self.factors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Multilinear ranks, the shape of the core."""
        return tuple(self.core.shape)

    def _part(self, *, imaginary: bool) -> Tucker:
        """Return one part: with A = [Re A, Im A] [1; i] the factors are real, and the core takes the rest."""
        core, factors = self.core, []
        for k, factor in enumerate(self.factors):
            if np.iscomplexobj(factor):
                core = np.concatenate([core, 1j * core], axis=k)  # r0 ... (2 rk) ...
                factor = np.concatenate([factor.real, factor.imag], axis=1)  # nk (2 rk)
            factors.append(factor)
        return Tucker(np.ascontiguousarray(core.imag if imaginary else core.real), tuple(factors))

    @numpy_arrays
    def _multiplied(self, number: Any) -> Tucker:
        return Tucker(number * self.core, self.factors)

    @numpy_arrays
    def _added(self, other: Tucker) -> Tucker:
        core = np.zeros(np.add(self.ranks, other.ranks), np.result_type(self.core, other.core))
        core[tuple(slice(r) for r in self.ranks)] = self.core
        core[tuple(slice(r, None) for r in self.ranks)] = other.core
        pairs = zip(self.factors, other.factors, strict=True)
        return Tucker(core, tuple(np.concatenate(pair, axis=1) for pair in pairs))

    def _constant(self, number: Any) -> Tucker:
        ones = tuple(np.ones((n, 1), self.dtype) for n in self.shape)
        return Tucker(np.ones((1,) * len(ones), self.dtype), ones)._multiplied(number)

    def full(self) -> Array:
        """Contract to the dense array (n[0], ..., n[d-1])."""
        refuse_too_large(self)
        return contiguous(multiply_modes(self.core, self.factors))  # type: ignore[no-any-return]

    @numpy_arrays
    def norm(self) -> float:
        """Frobenius norm, from the triangular factor of every leg, without the dense array and without cancellation."""
        return norm(multiply_modes(self.core, [r_factor(factor) for factor in self.factors]))


def multiply_modes(x: Array, matrices: Sequence[Array]) -> Array:
    """Return `x` (n[0], ...) multiplied along every leg by a matrix (m[k], n[k])."""
    for k, matrix in enumerate(matrices):
        x = mode_product(x, matrix, k)  # m0 ... mk [nk] n(k+1) ...
    return x


def refuse_large_core(function: str, ranks: Sequence[int], advice: str) -> None:
    """Raise where a Tucker core of these `ranks` has more legs than numpy allows, or too many entries."""
    if math.prod(ranks) > _LARGEST_CORE or len(ranks) > MAX_NDIM:
        raise ArgumentError(
            f"{function}: the core of a Tucker must have at most {_LARGEST_CORE:,} numbers and {MAX_NDIM} legs, got "
            f"{math.prod(ranks):.3g} and {len(ranks)}; {advice}."
        )
