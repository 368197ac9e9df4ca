"""Alternating least squares for the CP format, on factors (n[k], R) without separate weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import adjoint_times, residual_norm, times_adjoint
from tnlib.linalg.multilinear import contract_columns, khatri_rao, solve_gram

_LITTLE_CANCELLATION = 1e-7  # a difference above this fraction of its terms is right to six digits or more
_ROUNDING = 1e-13  # of the terms, added so that the residual is an upper bound


class Iterate(NamedTuple):
    """Result of an iteration."""

    factors: list[Array]  # (n[k], R); the last one carries the weights
    residual: float  # norm(x - y)
    n_iter: int
    stationary: bool


def als(x: Array, size: float, factors: Sequence[Array], *, n_iter: int, target: float, slow: float) -> Iterate:
    """Sweep over the legs of `x`, of norm `size`; each step solves for one factor with the others fixed.

    With K the Khatri-Rao product of the other factors, the least squares problem X_k = A_k K^T has the normal
    equations A_k (K^T conj(K)) = X_k conj(K), and K^T conj(K) is the entrywise product of their Gram matrices.

    The legs form two halves, and X_k conj(K) starts for all legs of one half with the same matrix product, that
    of x with the Khatri-Rao product of the other half: two such products a sweep, for any number of legs
    (Phan, Tichavsky and Cichocki, "Fast alternating LS algorithms for high order CANDECOMP/PARAFAC tensor
    factorizations", IEEE Trans. Signal Process. 61 (2013)). The iteration ends where the residual falls to
    `target`, or a sweep lowers it by less than the fraction `slow`.
    """
    # the split whose two Khatri-Rao products have the fewest rows in total
    split = min(range(1, x.ndim), key=lambda k: math.prod(x.shape[:k]) + math.prod(x.shape[k:]))
    halves = (range(split), range(split, x.ndim))
    matrix = x.reshape(math.prod(x.shape[:split]), -1)  # (left legs) (right legs)
    factors = list(factors)
    gram_matrices, right = grams(factors), khatri_rao(factors[split:])
    previous = np.inf
    for sweep in range(1, n_iter + 1):
        before = factors
        partial = times_adjoint(matrix, right.T)  # (left legs) [(right legs)] R
        factors, _ = _update(factors, gram_matrices, halves[0], partial)
        left = khatri_rao(factors[:split])
        partial = adjoint_times(left, matrix[None])[0].T  # (right legs) [(left legs)] R
        factors, projected = _update(factors, gram_matrices, halves[1], partial)
        right = khatri_rao(factors[split:])
        residual = _residual(matrix, size, factors, gram_matrices, projected, left, right)
        if residual > previous:  # by rounding alone, where components are nearly collinear
            return Iterate(before, previous, sweep, True)
        if residual <= target or previous - residual <= slow * residual:
            return Iterate(factors, residual, sweep, True)
        previous = residual
    return Iterate(factors, previous, n_iter, False)


def grams(factors: Sequence[Array]) -> list[Array]:
    """Return A_k^T conj(A_k), (R, R), of every factor."""
    return [factor.T @ factor.conj() for factor in factors]


def product_except(matrices: Sequence[Array], *excluded: int) -> Array:
    """Return the entrywise product of all `matrices` (R, R) but those at the `excluded` positions."""
    included = [matrix for k, matrix in enumerate(matrices) if k not in excluded]
    return functools.reduce(np.multiply, included) if included else np.ones_like(matrices[0])


def unit_columns(factor: Array) -> Array:
    """Divide every column by its norm, unless that is zero."""
    lengths = np.sqrt(np.add.reduce((factor * factor.conj()).real))  # in half the time of np.linalg.norm
    lengths[lengths == 0] = 1
    return np.asarray(factor / lengths)


def cp_residual(x: Array, factors: Sequence[Array]) -> float:
    """Return norm(x - y) of the CP y with these factors, from the entries of the difference."""
    half = x.ndim // 2
    left, right = khatri_rao(factors[:half]), khatri_rao(factors[half:])
    return residual_norm(x.reshape(len(left), -1), left, right.T)


def _update(
    factors: Sequence[Array], gram_matrices: list[Array], half: range, partial: Array
) -> tuple[list[Array], Array]:
    """Solve for the factors of one half; return them and X_k conj(K) of its last leg.

    `partial` (legs of the half, R) is x contracted with the conjugate factors of the other half. `gram_matrices` are
    those of all factors, and are kept up to date.
    """
    factors, rank = list(factors), partial.shape[-1]
    partial = partial.reshape(*(len(factors[k]) for k in half), rank)
    projected = partial
    for k in half:
        projected = contract_columns(partial, [factors[j].conj() for j in half], k - half.start)  # nk R
        factors[k] = solve_gram(projected, product_except(gram_matrices, k))
        if k < len(factors) - 1:  # the last factor carries the weights
            factors[k] = unit_columns(factors[k])
        (gram_matrices[k],) = grams([factors[k]])
    return factors, projected


def _residual(
    matrix: Array,
    size: float,
    factors: list[Array],
    gram_matrices: list[Array],
    projected: Array,
    left: Array,
    right: Array,
) -> float:
    """Return norm(x - y), or an upper bound at most 1e-6 larger.

    With <y, x> from the last solve its square is norm(x)^2 - 2 Re <y, x> + norm(y)^2, and norm(y)^2 the sum of the
    inner products of all components. Where these cancel, the difference is computed entry by entry.
    """
    overlaps = product_except(gram_matrices)
    square = size**2 - 2 * float(np.vdot(factors[-1], projected).real) + float(overlaps.sum().real)
    terms = size**2 + float(np.abs(overlaps).sum())
    if square > _LITTLE_CANCELLATION * terms:
        return math.sqrt(square + _ROUNDING * terms)
    return residual_norm(matrix, left, right.T)


# The keywords of tensorly's constrained_parafac; non-negative factors have an iteration of their own.
CONSTRAINTS = {"nonnegative": "non_negative", "monotone": "monotonicity", "unimodal": "unimodality"}


def constrained_cp(
    x: Array, factors: Sequence[Array], *, constraint: str, n_iter: int, slow: float, target: float
) -> Iterate:
    """Start from the moduli of `factors`: non-negative by hierarchical least squares, the others by AO-ADMM."""
    from tensorly.cp_tensor import CPTensor
    from tensorly.decomposition import constrained_parafac, non_negative_parafac_hals

    rank = factors[0].shape[1]
    start = CPTensor((np.ones(rank, x.dtype), [np.abs(factor).astype(x.dtype) for factor in factors]))
    if constraint == "nonnegative":
        cp, errors = non_negative_parafac_hals(x, rank, n_iter_max=n_iter, init=start, tol=slow, return_errors=True)
    else:
        keyword = {CONSTRAINTS[constraint]: True}
        cp, errors = constrained_parafac(
            x, rank, n_iter_max=n_iter, init=start, tol_outer=slow, return_errors=True, **keyword
        )
    weights, columns = cp
    columns = [np.asarray(factor, x.dtype) for factor in columns]
    columns[-1] = columns[-1] * np.asarray(weights, x.dtype)
    residual = cp_residual(x, columns)
    return Iterate(columns, residual, len(errors), len(errors) < n_iter or residual <= target)
