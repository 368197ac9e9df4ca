"""Alternating least squares for the CP format, on raw factors (n[k], R)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import times_adjoint
from tnlib.linalg.modes import khatri_rao, sum_columns
from tnlib.linalg.project import adjoint_times, residual_norm
from tnlib.linalg.solve import solve_gram

# Where the residual is this large a part of the tensor, its square is the difference of three squares without loss.
_CLEAR = 1e-7


class Iterate(NamedTuple):
    """Where an iteration arrived."""

    factors: list[Array]  # (n[k], R); the last one carries the weights
    residual: float
    n_iter: int
    stationary: bool


def als(x: Array, size: float, factors: Sequence[Array], *, n_iter: int, target: float, slow: float) -> Iterate:
    """Sweep over the legs of `x`, of norm `size`, each time solving for one factor with the others fixed.

    With K the Khatri-Rao product of the other factors, the least squares problem X_k = A_k K^T has the normal
    equations A_k (K^T conj(K)) = X_k conj(K), and K^T conj(K) is the entrywise product of their Gram matrices.

    The legs form two halves, and X_k conj(K) starts for all legs of one half with the same matrix product, that
    of x with the Khatri-Rao product of the other half: two such products a sweep, whatever the number of legs
    (Phan, Tichavsky and Cichocki, "Fast alternating LS algorithms for high order CANDECOMP/PARAFAC tensor
    factorizations", IEEE Trans. Signal Process. 61 (2013)). It ends where the residual falls to `target`, or a
    sweep lowers it by less than the part `slow`.
    """
    split = _halve(x.shape)
    halves = (range(split), range(split, x.ndim))
    flat = x.reshape(math.prod(x.shape[:split]), -1)
    factors = list(factors)
    right = khatri_rao(factors[split:])
    residual, previous = np.inf, np.inf
    for sweep in range(1, n_iter + 1):
        before = factors
        factors, _ = _update(factors, halves[0], times_adjoint(flat, right.T))  # (left legs) [(right legs)] R
        left = khatri_rao(factors[:split])
        partial = adjoint_times(left, flat[None])[0].T  # (right legs) [(left legs)] R
        factors, projected = _update(factors, halves[1], partial)
        right = khatri_rao(factors[split:])
        residual = _residual(flat, size, factors, projected, left, right)
        if residual > previous:  # only rounding raises it, where components are nearly collinear
            return Iterate(before, previous, sweep, True)
        if residual <= target or previous - residual <= slow * residual:
            return Iterate(factors, residual, sweep, True)
        previous = residual
    return Iterate(factors, residual, n_iter, False)


def grams(factors: Sequence[Array]) -> list[Array]:
    """Return A_k^T conj(A_k), (R, R), of every factor."""
    return [factor.T @ factor.conj() for factor in factors]


def product_but(matrices: Sequence[Array], *left_out: int) -> Array:
    """Return the entrywise product of all `matrices` (R, R) but those numbered."""
    out = np.ones_like(matrices[0])
    for k, matrix in enumerate(matrices):
        if k not in left_out:
            out = out * matrix
    return out


def _halve(shape: tuple[int, ...]) -> int:
    """Return after how many legs to split, so that the two Khatri-Rao products are small together."""
    return min(range(1, len(shape)), key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))


def _update(factors: Sequence[Array], half: range, partial: Array) -> tuple[list[Array], Array]:
    """Solve for the factors of one half; `partial` (legs of the half, R) has the legs of the other summed.

    Returned beside them is X_k conj(K) of the last leg.
    """
    factors, rank = list(factors), partial.shape[-1]
    partial = partial.reshape(*(len(factors[k]) for k in half), rank)
    projected = partial
    for k in half:
        gram = product_but(grams(factors), k)
        projected = sum_columns(partial, [factors[j].conj() for j in half], k - half.start)  # nk R
        factors[k] = solve_gram(projected, gram)
        if k < len(factors) - 1:  # the last factor carries the weights
            factors[k] = unit_columns(factors[k])
    return factors, projected


def _residual(flat: Array, size: float, factors: list[Array], projected: Array, left: Array, right: Array) -> float:
    """Return norm(x - y); with <y, x> from the last solve its square is norm(x)^2 - 2 Re <y, x> + norm(y)^2."""
    inner = float(np.vdot(factors[-1], projected).real)
    square = size**2 - 2 * inner + float(product_but(grams(factors)).sum().real)
    if square > _CLEAR * size**2:
        return math.sqrt(square)
    return residual_norm(flat, left, right.T)


def unit_columns(factor: Array) -> Array:
    """Divide every column by its norm, unless that is zero."""
    lengths = np.linalg.norm(factor, axis=0)
    return np.asarray(factor / np.where(lengths > 0, lengths, 1))
