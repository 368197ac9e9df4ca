"""Dense arrays to the CP format by alternating least squares."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit, report, roundoff
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng, as_rtol, is_one_of
from tnlib.decompose.constrained import CONSTRAINTS, constrained
from tnlib.decompose.prepare import prepare
from tnlib.formats.cp import CP
from tnlib.gauge.cp import fix_components
from tnlib.linalg.gram import gram
from tnlib.linalg.modes import khatri_rao
from tnlib.linalg.project import residual_norm
from tnlib.linalg.scale import norm, shift
from tnlib.linalg.solve import leading_eigenvectors
from tnlib.linalg.threads import own_threads
from tnlib.sweeps.als import Iterate, als, unit_columns
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.hosvd import st_hosvd
from tnlib.sweeps.levenberg import levenberg

# A sweep that lowers the error by less than this fraction of itself ends the iteration.
_STATIONARY = 1e-6
_SWEEPS = 30  # after which, if there is more to gain, Gauss-Newton steps take over
_NEARLY_EXACT = 1e-6  # of the norm
_MOST_UNKNOWNS = 1600  # of a Gauss-Newton step, a dense system
_MOST_ENTRIES = 1 << 20
_WORTHWHILE = 8  # times fewer entries, for a core to be made
_ROUNDED = 1e-3  # of the norm: a residual above does not change by the rounding of the factors to single precision
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
        None, or what every column of every factor must be, of real data: "nonnegative", "monotone" (no entry below
        the one before it) or "unimodal" (rising to one place and falling from there). The iterations are tensorly's.

    Returns
    -------
    Fit[CP]
        Unit columns, non-negative weights in descending order; leading entries are positive in every factor but
        the last, unless a constraint says what signs may be. The minimum found need not be the global one.

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
    scaled, exponent, size = prepare("cp", "x", x)
    if scaled.ndim < 2:
        raise ArgumentError(f"cp: x must have at least two legs, got shape {scaled.shape}; a vector has no components.")
    if constraint is not None and not is_one_of(constraint, CONSTRAINTS):
        known = ", ".join(f'"{name}"' for name in CONSTRAINTS)
        raise ArgumentError(f"cp: constraint must be None or one of {known}, got {constraint!r}; choose one of them.")
    if constraint is not None and np.iscomplexobj(scaled):
        raise ArgumentTypeError("cp: constraint needs real data, got a complex array; pass its real part.")

    generator = as_rng("cp", rng)
    target = max(rtol or 0.0, roundoff(scaled.dtype)) * size
    if constraint is None or size == 0:  # zero meets them all
        best = _free(scaled, size, rank, n_iter, target, generator, n_starts)
    else:
        run = partial(constrained, scaled, constraint=constraint, n_iter=n_iter, slow=_STATIONARY, target=target)
        best = _best(run, scaled, rank, target, generator, n_starts)

    rounded = [factor.astype(scaled.dtype) for factor in best.factors]
    weights, factors = fix_components(np.ones(rank, scaled.dtype), rounded, signs=constraint is None)
    weights = weights.astype(scaled.real.dtype)
    return report(
        "cp",
        CP(shift(weights, exponent), tuple(factors)),
        error=_error(scaled, size, best.residual, weights, factors),
        rtol=rtol,
        n_iter=best.n_iter,
        stationary=best.stationary,
    )


def _free(
    x: Array, size: float, rank: int, n_iter: int, target: float, rng: np.random.Generator, n_starts: int
) -> Iterate:
    """Iterate on a Tucker core of x: with the factors found there, x itself needs a few sweeps only."""
    ranks = [min(n, rank + rank // 4 + 2) for n in x.shape]
    if math.prod(ranks) * _WORTHWHILE > x.size or n_iter == 1:
        run = partial(_iterate, x, size, n_iter=n_iter, target=target)
        return _best(run, x, rank, target, rng, n_starts)
    sides = [min(n, x.size // n) for n in x.shape]
    core, bases = st_hosvd(x, Budget(size, None, sides, x.dtype), ranks)
    held = norm(core)
    within = math.sqrt(max(0.0, target**2 - max(0.0, size**2 - held**2)))
    run = partial(_iterate, core, held, n_iter=n_iter - 1, target=within)
    found = _best(run, core, rank, within, rng, n_starts)
    factors = [basis @ factor for basis, factor in zip(bases, found.factors, strict=True)]  # n [r'] R
    last = als(x, size, factors, n_iter=n_iter - found.n_iter, target=target, slow=_STATIONARY)
    return last._replace(n_iter=last.n_iter + found.n_iter)


def _iterate(x: Array, size: float, factors: list[Array], *, n_iter: int, target: float) -> Iterate:
    """Alternate while that is quick, then take Gauss-Newton steps where the system is small enough to solve."""
    newton = sum(factor.size for factor in factors) <= _MOST_UNKNOWNS and x.size <= _MOST_ENTRIES
    sweeps = min(n_iter, _SWEEPS) if newton else n_iter
    found = als(x, size, factors, n_iter=sweeps, target=target, slow=_STATIONARY)
    exact = found.residual <= _NEARLY_EXACT * size  # then rounding has stopped the sweeps, not a minimum
    settled = found.residual <= target or (found.stationary and not exact)
    if not newton or settled or found.n_iter == n_iter:
        return found
    used = found.n_iter
    found = levenberg(x, found.factors, n_iter=n_iter - used, target=target, slow=_STATIONARY)
    used += found.n_iter
    if found.residual > target and used < n_iter:  # where such a step would lead too far, sweeps go on
        more = als(x, size, found.factors, n_iter=n_iter - used, target=target, slow=_STATIONARY)
        used += more.n_iter
        found = min(more, found, key=lambda one: one.residual)
    return found._replace(n_iter=used)


def _best(
    run: Callable[[list[Array]], Iterate],
    x: Array,
    rank: int,
    target: float,
    rng: np.random.Generator,
    n_starts: int,
) -> Iterate:
    """Start from singular vectors, then from random factors, until `target` is reached or the starts are used up."""
    best = run(_singular_guess(x, rank, rng))
    for _ in range(n_starts - 1):
        if best.residual <= target:
            break
        best = min(best, run(_random_guess(x, rank, rng)), key=lambda one: one.residual)
    return best


def _error(x: Array, size: float, residual: float, weights: Array, factors: list[Array]) -> float:
    """Return the true error of what is returned: where rounding it to its dtype may show in the residual, anew."""
    if size == 0:
        return 0.0
    if residual > _ROUNDED * size:
        return residual / size
    half = x.ndim // 2
    left, right = khatri_rao(factors[:half]) * weights, khatri_rao(factors[half:])
    return residual_norm(x.reshape(len(left), -1), left, right.T) / size


def _random_guess(x: Array, rank: int, rng: np.random.Generator) -> list[Array]:
    return [unit_columns(_normal((n, rank), x.dtype, rng)) for n in x.shape]


def _singular_guess(x: Array, rank: int, rng: np.random.Generator) -> list[Array]:
    """Take leading left singular vectors of every unfolding, and random columns where there are too few.

    A little noise goes with them: singular vectors share the symmetries of x, and so can be a saddle point that
    least squares never leaves.
    """
    guess = _random_guess(x, rank, rng)
    for k, columns in enumerate(guess):
        count = min(rank, len(columns))
        columns[:, :count] *= _GUESS_NOISE
        slabs = x.reshape(math.prod(x.shape[:k]), len(columns), -1)
        columns[:, :count] += leading_eigenvectors(gram(slabs), count)
    return guess


def _normal(shape: tuple[int, int], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    draw = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        return np.asarray(draw + 1j * rng.standard_normal(shape))
    return draw
