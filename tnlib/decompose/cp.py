"""Dense arrays to the CP format by alternating least squares."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit, report, roundoff
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng, as_rtol
from tnlib.decompose.prepare import prepare
from tnlib.formats.cp import CP
from tnlib.gauge.cp import fix_components
from tnlib.linalg.modes import khatri_rao, sum_columns, unfold
from tnlib.linalg.scale import distance, shift
from tnlib.linalg.solve import leading_eigenvectors, solve_gram
from tnlib.linalg.threads import own_threads

# A sweep that lowers the error by less than this fraction of itself ends the iteration.
_STATIONARY = 1e-6
_GUESS_NOISE = 0.1  # beside unit vectors


@own_threads
def cp(
    x: Any,
    rank: int,
    *,
    rtol: float | None = None,
    n_iter: int = 500,
    n_starts: int = 1,
    rng: np.random.Generator | int | None = None,
    constraint: str | None = None,
) -> Fit[CP]:
    """Fit a sum of `rank` rank-one tensors to `x`; `fit.error` is norm(x - fit.value.full()) / norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), d >= 2, real or complex, 32 or 64 bits a component.
    rank
        Count R of components. More than the tensor needs is allowed.
    rtol
        Relative Frobenius error of the whole at which to stop, and which to warn about if missed. Without it
        the iteration stops where the error does.
    n_iter
        Sweeps at most, for each start.
    n_starts
        How many initial guesses to try; the best result is returned. The first guess holds singular vectors of
        the unfoldings, the others are random.
    rng
        A numpy random generator or a seed for it; None always draws the same numbers.
    constraint
        None, or "nonnegative" for factors without negative entries (real data; the iteration is tensorly's
        hierarchical alternating least squares).

    Returns
    -------
    Fit[CP]
        Unit columns, non-negative weights in descending order; leading entries are positive in every factor but
        the last. The minimum found need not be the global one.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `x` is not a finite array of at least two legs, or another argument is off.

    References
    ----------
    T. G. Kolda, B. W. Bader, "Tensor decompositions and applications", SIAM Review 51 (2009), section 3.4.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> i = np.arange(1.0, 5.0)
    >>> fit = tnlib.cp(np.multiply.outer(np.multiply.outer(i, i), i), 1)
    >>> fit.value.weights.round(3), fit.error < 1e-14
    (array([164.317]), True)
    """
    rtol, rank = as_rtol("cp", rtol), as_count("cp", "rank", rank)
    n_iter, n_starts = as_count("cp", "n_iter", n_iter), as_count("cp", "n_starts", n_starts)
    scaled, exponent, norm = prepare("cp", "x", x)
    if scaled.ndim < 2:
        raise ArgumentError(f"cp: x must have at least two legs, got shape {scaled.shape}; a vector has no components.")
    if constraint not in (None, "nonnegative"):
        raise ArgumentError(f'cp: constraint must be None or "nonnegative", got {constraint!r}; choose one of the two.')
    if constraint is not None and np.iscomplexobj(scaled):
        raise ArgumentTypeError("cp: constraint needs real data, got a complex array; pass its real part.")

    generator = as_rng("cp", rng)
    target = max(rtol or 0.0, roundoff(scaled.dtype)) * norm
    iterate = _als if constraint is None or norm == 0 else _nonnegative  # zero is non-negative
    best = iterate(scaled, _singular_guess(scaled, rank, generator), n_iter, target)
    for _ in range(n_starts - 1):
        if best.residual <= target:
            break
        found = iterate(scaled, _random_guess(scaled, rank, generator), n_iter, target)
        best = min(best, found, key=lambda one: one.residual)

    weights, factors = fix_components(np.ones(rank, scaled.dtype), best.factors)
    value = CP(shift(weights.astype(scaled.real.dtype), exponent), tuple(factors))
    residual = distance(scaled, CP(weights, tuple(factors)).full())
    return report(
        "cp",
        value,
        error=residual / norm if norm > 0 else 0.0,
        rtol=rtol,
        n_iter=best.n_iter,
        stationary=best.stationary,
    )


class _Iterate(NamedTuple):
    factors: list[Array]  # (n[k], R); the last one carries the weights
    residual: float
    n_iter: int
    stationary: bool


def _als(x: Array, factors: list[Array], n_iter: int, target: float) -> _Iterate:
    """Sweep over the legs, each time solving for one factor with the others fixed.

    With K the Khatri-Rao product of the other factors, the least squares problem X_k = A_k K^T has the normal
    equations A_k (K^T conj(K)) = X_k conj(K), and K^T conj(K) is the entrywise product of their Gram matrices.

    The legs form two halves, and X_k conj(K) starts for all legs of one half with the same matrix product, that
    of x with the Khatri-Rao product of the other half: two such products a sweep, whatever the number of legs
    (Phan, Tichavsky and Cichocki, "Fast alternating LS algorithms for high order CANDECOMP/PARAFAC tensor
    factorizations", IEEE Trans. Signal Process. 61 (2013)).
    """
    split = _halve(x.shape)
    halves = (range(split), range(split, x.ndim))
    flat = x.reshape(math.prod(x.shape[:split]), -1)
    right = khatri_rao(factors[split:])
    residual, previous = np.inf, np.inf
    for sweep in range(1, n_iter + 1):
        before = factors
        factors = _update(factors, halves[0], flat @ right.conj())  # (left legs) [(right legs)] R
        left = khatri_rao(factors[:split])
        factors = _update(factors, halves[1], flat.T @ left.conj())  # (right legs) [(left legs)] R
        right = khatri_rao(factors[split:])
        residual = distance(flat, left @ right.T)
        if residual > previous:  # only rounding raises it, where components are nearly collinear
            return _Iterate(before, previous, sweep, True)
        if residual <= target or previous - residual <= _STATIONARY * residual:
            return _Iterate(factors, residual, sweep, True)
        previous = residual
    return _Iterate(factors, residual, n_iter, False)


def _halve(shape: tuple[int, ...]) -> int:
    """Return after how many legs to split, so that the two Khatri-Rao products are small together."""
    return min(range(1, len(shape)), key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))


def _update(factors: list[Array], half: range, partial: Array) -> list[Array]:
    """Solve for the factors of one half; `partial` (legs of the half, R) has the legs of the other summed."""
    factors, rank = list(factors), partial.shape[-1]
    partial = partial.reshape(*(len(factors[k]) for k in half), rank)
    for k in half:
        gram: Array = np.ones((rank, rank), partial.dtype)
        for j, factor in enumerate(factors):
            if j != k:
                gram = gram * (factor.T @ factor.conj())  # R R
        projected = sum_columns(partial, [factors[j].conj() for j in half], k - half.start)  # nk R
        factors[k] = solve_gram(projected, gram)
        if k < len(factors) - 1:  # the last factor carries the weights
            factors[k] = _unit_columns(factors[k])
    return factors


def _nonnegative(x: Array, factors: list[Array], n_iter: int, target: float) -> _Iterate:
    """Run tensorly's hierarchical alternating least squares from the moduli of a guess."""
    from tensorly.cp_tensor import CPTensor
    from tensorly.decomposition import non_negative_parafac_hals

    rank = factors[0].shape[1]
    guess = CPTensor((np.ones(rank, x.dtype), [np.abs(factor) for factor in factors]))
    found, errors = non_negative_parafac_hals(
        x, rank, n_iter_max=n_iter, init=guess, tol=_STATIONARY, return_errors=True
    )
    weights, columns = found
    columns = [np.asarray(factor, x.dtype) for factor in columns]
    columns[-1] = columns[-1] * np.asarray(weights, x.dtype)
    residual = distance(x, CP(np.ones(rank, x.dtype), tuple(columns)).full())
    return _Iterate(columns, residual, len(errors), len(errors) < n_iter or residual <= target)


def _unit_columns(factor: Array) -> Array:
    lengths = np.linalg.norm(factor, axis=0)
    return factor / np.where(lengths > 0, lengths, 1)


def _random_guess(x: Array, rank: int, rng: np.random.Generator) -> list[Array]:
    return [_unit_columns(_normal((n, rank), x.dtype, rng)) for n in x.shape]


def _singular_guess(x: Array, rank: int, rng: np.random.Generator) -> list[Array]:
    """Take leading left singular vectors of every unfolding, and random columns where there are too few.

    A little noise goes with them: singular vectors share the symmetries of x, and so can be a saddle point that
    least squares never leaves.
    """
    guess = _random_guess(x, rank, rng)
    for k, columns in enumerate(guess):
        flat = unfold(x, k)
        count = min(rank, len(flat))
        columns[:, :count] *= _GUESS_NOISE
        columns[:, :count] += leading_eigenvectors(flat @ flat.conj().T, count)
    return guess


def _normal(shape: tuple[int, int], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    draw = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        return (draw + 1j * rng.standard_normal(shape)).astype(dtype)
    return draw.astype(dtype)
