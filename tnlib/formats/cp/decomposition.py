r"""CP decomposition of a dense array: starts, alternating least squares, Levenberg-Marquardt on a Tucker core.

The array is projected onto the leading singular vectors U_k of every leg, a few more than R, and the iteration runs on
the core. The projection is orthogonal, so the error of the whole is known exactly:

    norm(x - y)^2  =  norm(discarded part of x)^2 + norm(core - CP of the core)^2,      factor k of y  =  U_k (factor k)

An array in memory gets a few sweeps more, from these factors; one that exceeds memory is only read for its core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit, after_sweeps, report, roundoff, wrong_type
from tnlib._typing import Array, SlicedArray
from tnlib._validate import as_count, as_rng, as_rtol, is_one_of, refuse_foreign_keywords
from tnlib.formats.cp.als import CONSTRAINTS, Iterate, als, constrained_cp, cp_residual, unit_columns
from tnlib.formats.cp.als_of_known_entries import als_of_known_entries, cp_array
from tnlib.formats.cp.format import CP
from tnlib.formats.cp.levenberg_marquardt import levenberg_marquardt
from tnlib.formats.cp.operations import normalize_components
from tnlib.formats.tucker.st_hosvd import st_hosvd, unfold_slabs
from tnlib.linalg.gram import gram
from tnlib.linalg.missing_entries import describe_known, fill_missing, residual_of_known
from tnlib.linalg.multilinear import leading_eigenvectors
from tnlib.linalg.randomized import standard_normal
from tnlib.linalg.scaling import norm, prepare, restore
from tnlib.linalg.threads import single_threaded_blas
from tnlib.out_of_core import open_large

if TYPE_CHECKING:
    from tnlib.out_of_core.passes import Passes
    from tnlib.out_of_core.storage import Storage

_STATIONARY = 1e-6  # a sweep that lowers the error by less than this fraction of itself ends the iteration
_ALTERNATING_SWEEPS = 30  # before Gauss-Newton steps take over
_NEARLY_EXACT = 1e-6  # residual, relative to the norm, below which rounding ends the sweeps rather than a minimum
_NEWTON_UNKNOWNS = 1600  # largest dense system of a Gauss-Newton step
_NEWTON_ENTRIES = 1 << 20
_CORE_SAVING = 8  # factor by which a Tucker core must have fewer entries, for the iteration to run on it
_LARGE_RESIDUAL = 1e-3  # of the norm: rounding the factors to single precision changes a larger one by little
_LARGE_WEIGHTS = 3  # times the norm: components cancel each other, and their rounding does not
_START_NOISE = 0.1  # length of the random columns added to unit vectors


@single_threaded_blas
@refuse_foreign_keywords
def cp(
    x: ArrayLike | SlicedArray,
    rank: int,
    *,
    rtol: float | None = None,
    n_iter: int = 500,
    n_starts: int = 1,
    rng: np.random.Generator | int | None = None,
    constraint: str | None = None,
    init: CP | None = None,
    storage: Storage | None = None,
) -> Fit[CP]:
    """Fit a sum of `rank` rank-one tensors to `x`; `fit.error` is norm(x - fit.value.full()) / norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), d >= 2, real or complex, 32 or 64 bits a component. If the array exceeds memory, as in
        `tt_svd`, the CP of its Tucker core is computed. Missing entries are those of a numpy masked array.
    rank
        Number R of components; it may exceed the rank of the tensor.
    rtol
        Relative Frobenius error of the whole tensor at which to stop. If None, stop when the error no longer decreases.
    n_iter, n_starts
        Maximal number of sweeps per initial guess, and number of initial guesses; the best result is returned. The
        first guess consists of singular vectors of the unfoldings, the others are random.
    rng
        A numpy random generator, or a seed; None stands for a fixed seed.
    constraint
        Constraint on every column of every factor, for real data: "nonnegative", "monotone" (no entry below the one
        before it), "unimodal" (rising to one place and falling from there) or None. The iterations are tensorly's.
        None for an array that exceeds memory or has missing entries.
    init
        A CP of the shape of `x` and of `rank`, which replaces the first guess: the result of a smaller `n_iter`, or of
        similar data.
    storage
        How an array that exceeds memory is read, see `Storage`; without `one_pass`.

    Returns
    -------
    Fit[CP]
        With unit columns, non-negative weights in descending order, and positive leading entries in every factor but
        the last, unless a constraint determines the signs. The result is a local minimum of the error, not necessarily
        the global one. If entries are missing, `error` is that of the known entries relative to their norm, and
        `certified` False.

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
    passes, dense = open_large("cp", "x", x, storage, {"rank": rank}, one_read=False)
    if passes is None:
        dense, known = fill_missing("cp", "x", dense)
        scaled, exponent, size = prepare("cp", "x", dense)
        dtype = scaled.dtype
        _check_constraint(constraint, dtype, scaled.shape, known=known)
    else:
        dtype, known = passes.dtype, None
        _check_constraint(constraint, dtype, passes.shape, in_memory=False)
        tucker, exponent, size = _core_in_passes(passes, rank)

    first = _as_factors(init, scaled.shape if passes is None else passes.shape, rank, dtype)
    starts = partial(_starts, rank=rank, n_starts=n_starts, rng=as_rng("cp", rng), first=first)
    target = max(rtol or 0.0, roundoff(dtype)) * size
    if passes is not None:
        best = _on_core(tucker, starts, n_iter=n_iter, target=target)
    elif known is not None:
        run = partial(als_of_known_entries, known, scaled, n_iter=n_iter, slow=_STATIONARY, target=target)
        best = _best(run, starts(scaled), target)
    elif constraint is None or size == 0:  # zero meets every constraint
        best = _unconstrained(scaled, size, rank, starts, n_iter=n_iter, target=target)
    else:
        run = partial(constrained_cp, scaled, constraint=constraint, n_iter=n_iter, slow=_STATIONARY, target=target)
        best = _best(run, starts(scaled), target)

    ones, rounded = np.ones(rank, np.finfo(dtype).dtype), [factor.astype(dtype) for factor in best.factors]
    weights, factors = normalize_components(ones, rounded, signs=constraint is None)
    if passes is None:
        residual = _rounded_residual(scaled, known, size, best.residual, weights, factors)
    else:
        residual = tucker.residual(weights, factors)
    error, value = residual / size if size > 0 else 0.0, CP(restore("cp", "x", weights, exponent), tuple(factors))
    note = describe_known(known) if known is not None else None
    fit = report("cp", value, error=error, rtol=rtol, n_iter=best.n_iter, estimate=note)
    return after_sweeps("cp", fit, rtol=rtol, stationary=best.stationary)


def _check_constraint(
    constraint: str | None,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    *,
    in_memory: bool = True,
    known: Array | None = None,
) -> None:
    if len(shape) < 2:
        raise ArgumentError(f"cp: x must have at least two legs, got shape {shape}; a vector has no components.")
    if constraint is None:
        return
    if not is_one_of(constraint, CONSTRAINTS):
        names = ", ".join(f'"{name}"' for name in CONSTRAINTS)
        raise ArgumentError(f"cp: constraint must be None or one of {names}, got {constraint!r}; choose one of them.")
    if dtype.kind == "c":
        raise ArgumentTypeError("cp: constraint needs real data, got a complex array; pass its real part.")
    if not in_memory:
        raise ArgumentError(
            f"cp: constraint must be None for an array that exceeds memory, got {constraint!r}; raise memory."
        )
    if known is not None:
        raise ArgumentError(
            f"cp: constraint must be None for an array with missing entries, got {constraint!r}; fill them first."
        )


def _as_factors(init: Any, shape: tuple[int, ...], rank: int, dtype: np.dtype[Any]) -> list[Array] | None:
    """Return the factors of the first guess in double precision, None without one."""
    if init is None:
        return None
    if not isinstance(init, CP):
        raise wrong_type("cp", "init", "a CP", init, "start from the value of an earlier fit")
    if init.shape != shape or len(init.weights) != rank:
        raise ArgumentError(
            f"cp: init must have the shape of x, {shape}, and rank {rank}, got {init.shape} and {len(init.weights)}; "
            "change rank, or leave init out."
        )
    if init.dtype.kind == "c" and dtype.kind != "c":
        raise ArgumentTypeError("cp: init must be real for real data, got a complex CP; leave it out.")
    return [factor.astype(np.result_type(dtype, np.float64)) for factor in init.factors]  # weights are solved for


def _rounded_residual(
    x: Array, known: Array | None, size: float, residual: float, weights: Array, factors: Sequence[Array]
) -> float:
    """Return norm(x - y) of the arrays in their dtype: the `residual` before rounding, where that changes little."""
    if residual > _LARGE_RESIDUAL * size and norm(weights) <= _LARGE_WEIGHTS * size:
        return residual
    weighted = [factors[0] * weights, *factors[1:]]
    return cp_residual(x, weighted) if known is None else residual_of_known(x, known, cp_array(weighted))


class _TuckerCore(NamedTuple):
    """A core in double precision, its bases (n[k], r[k]), and the norm of the part of the array outside of them."""

    core: Array
    bases: list[Array]
    discarded: float

    def residual(self, weights: Array, factors: Sequence[Array]) -> float:
        """Return the Frobenius norm of the array minus the CP with these weights and factors (n[k], R)."""
        inside = [basis.conj().T @ factor for basis, factor in zip(self.bases, factors, strict=True)]  # r [n] R
        return math.hypot(self.discarded, cp_residual(self.core, [inside[0] * weights, *inside[1:]]))


def _ranks_of_core(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the ranks of the Tucker core that a CP of `rank` is fitted on."""
    # A tensor of CP rank R has multilinear ranks of at most R; a few more hold the part of the noise that matters.
    return tuple(min(n, rank + rank // 4 + 2) for n in shape)


def core_ranks(shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
    """Return the ranks of the Tucker core that a CP of `rank` is fitted on, None where it saves too little."""
    ranks = _ranks_of_core(shape, rank)
    return ranks if math.prod(ranks) * _CORE_SAVING <= math.prod(shape) else None


def _core_in_passes(passes: Passes, rank: int) -> tuple[_TuckerCore, int, float]:
    """Return the core of an array that exceeds memory, its power of two, and the norm of the array at that scale."""
    from tnlib.formats.tucker.tucker_out_of_core import st_hosvd_in_passes

    with passes:
        core, bases, budget = st_hosvd_in_passes(passes, None, _ranks_of_core(passes.shape, rank))
        return _TuckerCore(core, bases, budget.discarded), passes.source.exponent, budget.norm


def _unconstrained(
    x: Array, size: float, rank: int, starts: Callable[..., Iterator[list[Array]]], *, n_iter: int, target: float
) -> Iterate:
    """Iterate on a Tucker core of `x`, of norm `size`: from the factors of its CP, x itself needs a few sweeps."""
    ranks = core_ranks(x.shape, rank)
    if ranks is None or n_iter == 1:
        return _best(partial(_iterate, x, size, n_iter=n_iter, target=target), starts(x), target)
    core, bases, budget = st_hosvd(x, size, None, ranks)
    on_core = _on_core(_TuckerCore(core, bases, budget.discarded), starts, n_iter=n_iter - 1, target=target)
    last = als(x, size, on_core.factors, n_iter=n_iter - on_core.n_iter, target=target, slow=_STATIONARY)
    return last._replace(n_iter=last.n_iter + on_core.n_iter)


def _on_core(
    tucker: _TuckerCore, starts: Callable[..., Iterator[list[Array]]], *, n_iter: int, target: float
) -> Iterate:
    """Iterate on a core alone, and return the factors of the whole array."""
    core_target = math.sqrt(max(0.0, target**2 - tucker.discarded**2))  # the discarded part is orthogonal to the core
    run = partial(_iterate, tucker.core, norm(tucker.core), n_iter=n_iter, target=core_target)
    best = _best(run, starts(tucker.core, bases=tucker.bases), core_target)
    factors = [basis @ factor for basis, factor in zip(tucker.bases, best.factors, strict=True)]  # n [r] R
    return best._replace(factors=factors, residual=math.hypot(best.residual, tucker.discarded))


def _iterate(x: Array, size: float, factors: list[Array], *, n_iter: int, target: float) -> Iterate:
    """Alternate while that is fast, then take Gauss-Newton steps where their system is small enough to solve."""
    newton = sum(factor.size for factor in factors) <= _NEWTON_UNKNOWNS and x.size <= _NEWTON_ENTRIES
    sweeps = min(n_iter, _ALTERNATING_SWEEPS) if newton else n_iter
    current = als(x, size, factors, n_iter=sweeps, target=target, slow=_STATIONARY)
    at_minimum = current.stationary and current.residual > _NEARLY_EXACT * size
    if not newton or current.residual <= target or at_minimum or current.n_iter == n_iter:
        return current
    steps = levenberg_marquardt(x, current.factors, n_iter=n_iter - current.n_iter, target=target, slow=_STATIONARY)
    used = current.n_iter + steps.n_iter
    current = min(steps, current, key=lambda iterate: iterate.residual)
    if current.residual > target and used < n_iter:  # sweeps go on where large components end the steps
        more = als(x, size, current.factors, n_iter=n_iter - used, target=target, slow=_STATIONARY)
        used += more.n_iter
        current = min(more, current, key=lambda iterate: iterate.residual)
    return current._replace(n_iter=used)


def _best(run: Callable[[list[Array]], Iterate], starts: Iterator[list[Array]], target: float) -> Iterate:
    """Return the iterate of the smallest residual; the first one within `target` ends the search."""
    best = run(next(starts))
    while best.residual > target and (start := next(starts, None)) is not None:
        best = min(best, run(start), key=lambda iterate: iterate.residual)
    return best


def _starts(
    x: Array,
    rank: int,
    n_starts: int,
    rng: np.random.Generator,
    first: Sequence[Array] | None,
    bases: Sequence[Array] | None = None,
) -> Iterator[list[Array]]:
    """Yield one guess, `first` (projected on `bases`) or from singular vectors, then random ones: columns (n[k], R)."""
    if first is None:
        yield _singular_vectors(x, rank, rng)
    else:
        yield [basis.conj().T @ a for basis, a in zip(bases, first, strict=True)] if bases else list(first)
    for _ in range(n_starts - 1):
        yield _random_columns(x, rank, rng)


def _singular_vectors(x: Array, rank: int, rng: np.random.Generator) -> list[Array]:
    """Return leading left singular vectors of every unfolding, and random columns where there are too few."""
    # Noise, because singular vectors share the symmetries of x, and can be a saddle point of least squares.
    factors = _random_columns(x, rank, rng)
    for k, columns in enumerate(factors):
        count = min(rank, len(columns))
        columns[:, :count] *= _START_NOISE
        columns[:, :count] += leading_eigenvectors(gram(unfold_slabs(x, k)), count)
    return factors


def _random_columns(x: Array, rank: int, rng: np.random.Generator) -> list[Array]:
    """Return unit columns (n[k], R) with normally distributed entries, complex for complex `x`."""
    dtype = np.result_type(x, np.float64)
    return [unit_columns(standard_normal((n, rank), dtype, rng)) for n in x.shape]
