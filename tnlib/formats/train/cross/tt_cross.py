"""TT-cross: a function of indices to a tensor train."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError, ConvergenceWarning
from tnlib._fit import Fit, roundoff
from tnlib._stored_arrays import MAX_NDIM
from tnlib._typing import Array
from tnlib._validate import as_count, as_max_rank, as_rng, as_rtol, as_sizes, refuse_foreign_keywords
from tnlib.formats.train.cross.cached_function import CachedFunction, CallBudgetExceeded
from tnlib.formats.train.cross.error_estimate import ErrorEstimator, Sample
from tnlib.formats.train.cross.interpolation import CrossInterpolation
from tnlib.formats.train.cross.jumps import sample_jumps, sample_kinks
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_rounding import round_train
from tnlib.formats.train.tt_svd import tt_svd

_LONGEST = 1 << 20  # values of all legs, beyond which a budget of fewer calls cannot pay for one row of every core
_FIRST_SAMPLES = 512  # points from which the first pivot is taken
_ZERO_GROWTH = 8  # between one sample at which f is zero and the next
# Entries up to which all of them are evaluated: of more, smooth functions need less than half. Of more entries all are
# evaluated once a third is known: TT-SVD of all is certified, and no estimate sees ten wrong ones of 65,536.
_WHOLE, _PER_KNOWN = 1 << 12, 3
_FRESH = 1 / 25  # of all calls, for the last test at uniform points
# Uniform points of the last test, and the part of the budget that they may take: 2,048 points meet a feature on 0.22 %
# of the entries with probability 0.99.
_TESTED, _TESTED_BUDGET = 1 << 11, 1 / 8
# A peak with fewer entries that are not zero on the lines through it is isolated, and there may be others: then the
# last test takes a part of the budget.
_BESIDE, _ISOLATED = 1 / 4, 1 / 4
_REPEATED = 4  # times as many fresh points as it took to find one error, for others of its kind to be met (98 %)
# Points of the error estimate in every sweep, and of the final one: at least, part of all calls, at most.
_SAMPLES, _FINAL_SAMPLES = (48, 1 / 32, 1024), (512, 1 / 8, 16_384)
_RESERVED = 1 / 8  # of the budget, for the final estimate
_CROSSINGS = 32  # points between the pivots of two bonds that are tried in every sweep
_MANY = 16  # effective number of points that carry the norm of the first sample where f has no peak
_PEAK_RATIO = 100.0  # between a peak and the largest of the first sample, above which the peak is no pivot
_CLIMBS = 4  # starting points of the final search for errors
_NEW_POINTS = 4  # added at a time, and no more than the rank
# Fractions of the error at a point, tried one after the other; smaller terms of it get no pivot.
_THRESHOLDS = (3e-3, 3e-4, 3e-5, 3e-6)
_ROUNDOFF = 8  # eps of the values beside a residual, below which it is roundoff
_OVERSAMPLED, _EXTRA_ROWS = 2, 2  # rows of the cross for a `max_rank` r, 2 r + 2: rounding them is better than r rows
_TARGET = 0.7  # of rtol: few samples underestimate rare errors
_ROUNDING, _LEAST_ROUNDING = 0.4, 0.01  # of rtol


@refuse_foreign_keywords
def tt_cross(
    f: Callable[[Array], Any],
    shape: Sequence[int],
    *,
    rtol: float,
    max_calls: int = 1_000_000,
    rng: np.random.Generator | int | None = None,
    pivots: Sequence[Sequence[int]] | Array | None = None,
    max_rank: int | None = None,
    callback: Callable[[Fit[TensorTrain]], object] | None = None,
) -> Fit[TensorTrain]:
    """Interpolate the tensor x[i] = f(i) by a train so that norm(x - fit.value.full()) <= rtol * norm(x), as estimated.

    Parameters
    ----------
    f
        Takes an integer array (n_points, d) of indices and returns (n_points,) numbers, real or complex. Each index is
        evaluated once. Its exceptions pass through.
    shape
        (n[0], ..., n[d-1]), the sizes of the legs.
    rtol
        Relative Frobenius error of the whole tensor.
    max_calls
        Maximal number of evaluations of f, including those for the error estimate. If it is too small, the best train
        so far is returned with a ConvergenceWarning. For functions that are zero at most indices and at most neighbours
        of a non-zero entry, a quarter or more of it is spent on the error estimate, or all entries are evaluated if it
        covers them. All are evaluated as well where it covers them and a third of them is known.
    rng
        A numpy random generator, or a seed; None stands for a fixed seed.
    pivots
        (m, d), indices at which f is known to be large, such as narrow peaks, which random indices do not meet. None
        for no such knowledge.
    max_rank
        Maximal rank of every bond. The interpolation has up to 2 max_rank + 2 rows per bond and is rounded. If the
        error then misses rtol, the fit has not converged.
    callback
        Called after every sweep with the train of that sweep as a `Fit`: `error` is an estimate from few points,
        `n_calls` and `n_iter` count so far. StopIteration ends the search, and the best train is returned.

    Returns
    -------
    Fit[TensorTrain]
        Left-canonical with the last core as centre, rounded to rtol. `error` is an estimate and `certified` False: the
        root mean square of :math:`f - t`, t the train, over fresh random indices, half of them uniform and half drawn
        from :math:`|t|^2`, weighted so that its expectation is the Frobenius norm, plus two standard errors. The last
        note states the fraction of the entries below which a feature may be missed by these indices, at a confidence of
        0.99; the error does not contain such a feature. Tensors of up to 4096 entries, and those of which a third has
        been evaluated, are evaluated completely, if `max_calls` allows it, and decomposed by TT-SVD; `certified` is
        then True. If f is zero wherever it was evaluated, but not evaluated everywhere, the fit is zero and has not
        converged. `n_calls` is the number of evaluations.

    References
    ----------
    I. V. Oseledets, E. E. Tyrtyshnikov, "TT-cross approximation for multidimensional arrays", Linear Algebra Appl.
    432 (2010); Y. Nunez Fernandez et al., "Learning tensor networks with tensor cross interpolation", SciPost Phys. 18
    (2025), for pivots from errors of the whole; A. J. Ferris, G. Vidal, "Perfect sampling with unitary tensor
    networks", Phys. Rev. B 85 (2012).

    Examples
    --------
    The Boltzmann weights of an Ising chain of 50 spins are a train of rank 2.

    >>> import numpy as np, tnlib
    >>> def weights(spins):
    ...     s = 2 * spins - 1
    ...     return np.exp(0.4 * (s[:, 1:] * s[:, :-1]).sum(axis=1))
    >>> fit = tnlib.tt_cross(weights, (2,) * 50, rtol=1e-10)
    >>> max(fit.value.ranks), fit.converged
    (2, True)
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"tt_cross: f must be a function of an integer array (n_points, d), got a {type(f).__name__}; "
            "to decompose an array use tnlib.tt_svd."
        )
    shape, max_calls = as_sizes("tt_cross", "shape", shape), as_count("tt_cross", "max_calls", max_calls)
    if sum(shape) > max(max_calls, _LONGEST):
        raise ArgumentError(
            f"tt_cross: the legs of shape must have at most {max(max_calls, _LONGEST):,} values in total, got "
            f"{sum(shape):,}; split long legs, for example into binary digits, or raise max_calls."
        )
    tolerance = as_rtol("tt_cross", rtol)
    if tolerance is None:
        raise ArgumentTypeError("tt_cross: rtol must be a real number, got None; pass for example rtol=1e-6.")
    if callback is not None and not callable(callback):
        raise ArgumentTypeError(
            f"tt_cross: callback must be a function of a Fit or None, got a {type(callback).__name__}."
        )
    known, max_rank = _as_pivots(pivots, shape), as_max_rank("tt_cross", max_rank)
    cached = CachedFunction("tt_cross", f, shape, max_calls, reserved=int(_RESERVED * max_calls))
    search = _Search(cached, shape, tolerance, as_rng("tt_cross", rng), max_calls, max_rank, callback)
    try:
        search.run(known)
        reason = "no pivot lowers it; f may be rounded that much, otherwise try another rng"
    except CallBudgetExceeded:
        reason = _reason_of_budget(max_calls, max(shape))
    except _Stopped:
        reason = "callback has ended the search"
    best = replace(search.finish(), n_calls=cached.n_calls)
    if not best.converged:
        if max_rank is not None and max(best.value.ranks) == max_rank:
            reason = f"max_rank={max_rank} is reached, raise it"
        text = _missed(best, tolerance, reason, is_zero=search.is_zero)
        warnings.warn(text, ConvergenceWarning, stacklevel=3)
    return best


def _missed(best: Fit[TensorTrain], tolerance: float, reason: str, *, is_zero: bool) -> str:
    """Return the warning about a fit that has not converged."""
    if is_zero:
        return (
            f"tt_cross: f is zero at all of the {best.n_calls:,} points where it was evaluated, and may not be "
            "elsewhere; pass pivots, indices where it is not, or raise max_calls."
        )
    return f"tt_cross: the error is estimated as {best.error:.3g} and misses rtol={tolerance:.3g}: {reason}."


def _reason_of_budget(max_calls: int, longest: int) -> str:
    """Return why `max_calls` did not suffice for legs of at most `longest` values."""
    if longest > max_calls:
        return (
            f"a leg of {longest:,} values takes more evaluations than max_calls={max_calls:,}; split it, for example "
            "into binary digits"
        )
    return f"max_calls={max_calls} is spent"


def _as_pivots(pivots: Any, shape: tuple[int, ...]) -> Array:
    """Return indices (m, d), none for None."""
    if pivots is None:
        return np.empty((0, len(shape)), np.intp)
    points = np.asarray(pivots)
    if points.ndim != 2 or points.shape[1] != len(shape) or points.dtype.kind not in "iu" or len(points) == 0:
        raise ArgumentError(
            f"tt_cross: pivots must be integers (m, {len(shape)}), one index in every row, got {points.dtype} of shape "
            f"{points.shape}."
        )
    outside = np.argwhere((points < 0) | (points >= np.array(shape)))
    if len(outside):
        row, leg = outside[0].tolist()
        raise ArgumentError(
            f"tt_cross: pivots must be indices of shape, got {points[row, leg]} for leg {leg} of size {shape[leg]}."
        )
    return np.unique(points.astype(np.intp), axis=0)


class _Stopped(Exception):
    """The callback has raised StopIteration."""


class _Search:
    """A cross interpolation that adds pivots at sampled errors until the errors are within the tolerance."""

    def __init__(
        self,
        f: CachedFunction,
        shape: tuple[int, ...],
        rtol: float,
        rng: np.random.Generator,
        max_calls: int,
        max_rank: int | None,
        callback: Callable[[Fit[TensorTrain]], object] | None,
    ) -> None:
        self._max_rank, self._callback = max_rank, callback
        self._f, self._shape, self._rtol, self._rng = f, shape, rtol, rng
        self._errors = ErrorEstimator(f, shape, rng)
        self._zero = round_train(TensorTrain([np.zeros((1, n, 1)) for n in shape]), None, None)[0]
        self._best = Fit(self._zero, 1.0, False, False, 0)
        self._cross: CrossInterpolation | None = None
        self._affordable = math.prod(shape) <= max_calls and len(shape) <= MAX_NDIM
        self._budget, self._fresh = f.remaining, 0  # fresh points that the last test must have at least
        self.is_zero = False  # wherever f was evaluated, which is not everywhere
        self._missed_error = 0.0  # found by the last test, 0 if it was passed

    def run(self, pivots: Array) -> None:
        """Iterate until the train has converged, or no pivot lowers the error; CallBudgetExceeded at the budget."""
        start = None if self._affordable and math.prod(self._shape) <= _WHOLE else self._initial_points(pivots)
        if start is None:
            if self._affordable:
                self._decompose_all()
            else:
                self.is_zero = True
                self._best = Fit(self._zero, 0.0, False, False, 0, (self._zero_note(),))
            return
        most = math.inf if self._max_rank is None else _OVERSAMPLED * self._max_rank + _EXTRA_ROWS
        self._cross = cross = CrossInterpolation(self._f, self._shape, start[0], most)
        if len(start) > 1:
            self._grow(cross, self._errors.compare(start, self._zero))
        n_iter, rounding = 0, _ROUNDING * self._rtol
        while True:
            if self._knows_much:
                self._decompose_all()
                return
            train = self._train(cross, rounding)
            target = max(_TARGET * self._rtol, roundoff(train.dtype, len(self._shape) + 1))
            sample, error = self._estimate(cross, train, target)
            if error < self._best.error:
                self._best = Fit(train, error, False, False, n_iter)
            self._report(train, error, n_iter)
            if error <= target:
                sample, tested = self._test(train, target)
                error = max(error, tested)
                if self._knows_much:
                    continue
                self._best = Fit(train, error, False, error <= target, n_iter)
                if error <= target:
                    return
            if not self._grow(cross, sample):
                if rounding <= _LEAST_ROUNDING * self._rtol or max(train.ranks) == self._max_rank:
                    return
                rounding /= 4  # the error was that of rounding
            n_iter += 1

    def _report(self, train: TensorTrain, error: float, n_iter: int) -> None:
        """Call the callback of the caller with the train of a sweep."""
        if self._callback is not None:
            try:
                self._callback(Fit(train, error, False, False, n_iter, n_calls=self._f.n_calls))
            except StopIteration as stop:
                raise _Stopped from stop

    @property
    def _knows_much(self) -> bool:
        """Test if all entries may be evaluated, and so many are that the others are evaluated too."""
        return self._affordable and self._is_known

    @property
    def _is_known(self) -> bool:
        return _PER_KNOWN * self._f.n_calls >= math.prod(self._shape)

    def finish(self) -> Fit[TensorTrain]:
        """Return the best train; after an interruption, with an estimate from the rest of the budget."""
        best = self._best
        if best.certified:
            return best
        self._f.release()
        count = min(_FINAL_SAMPLES[0], self._f.remaining)
        if not (best.converged or best.error == 1.0 or self.is_zero or count < _SAMPLES[0]):
            error = max(self._errors.estimate(best.value, count, self._cross)[1], self._missed_error)
            best = replace(best, error=error, converged=error <= self._rtol)
        count = len(self._errors.uniform)
        share = 100 * (1 - 0.01 ** (1 / max(1, count)))
        note = (
            f"features on fewer than {share:.2g} % of the entries may be missed by {count:,} uniform indices, at a "
            "confidence of 0.99, and are not in the error; name known ones by pivots"
        )
        return replace(best, notes=(*best.notes, note))

    def _decompose_all(self) -> None:
        """Evaluate all entries, and decompose them by TT-SVD."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # tt_cross itself warns of a missed tolerance
            fit = tt_svd(self._f.evaluate_all(), rtol=self._rtol, max_rank=self._max_rank)
        self._best = replace(fit, notes=fit.notes if self._f.largest > 0 else (self._zero_note(),))

    def _zero_note(self) -> str:
        return f"f is zero at all of the {self._f.n_calls} points where it was evaluated"

    def _initial_points(self, pivots: Array) -> Array | None:
        """Return indices (m, d) where |f| is large, `pivots` first, None where it seems to be zero.

        Where few points carry the norm of the first sample, f has a peak, the first pivot. Where many do, the largest
        of them is the first pivot and the peak the second, unless it is so far above all others that it spoils digits.
        """
        at_pivots = self._errors.compare(pivots, self._zero)
        if at_pivots.errors.any():
            known = at_pivots.points[np.argsort(-at_pivots.errors, kind="stable")]
            return known[: np.count_nonzero(at_pivots.errors)]
        count = _FIRST_SAMPLES
        while True:
            sample = self._errors.compare(self._errors.sample_uniform(count), self._zero)
            if sample.errors.any():
                break
            self._fresh = len(self._errors.uniform)
            count = min(_ZERO_GROWTH * count, self._f.remaining - self._budget // 2)
            if self._affordable or count <= 0:
                return None
        top = sample.largest(1).points
        peak, lines = self._errors.climb(top, self._zero)
        beside = sum(np.count_nonzero(line) - 1 for line in lines) / max(1, sum(self._shape) - len(lines))
        if beside < _BESIDE and 2 * np.count_nonzero(sample.errors) < len(sample.errors):
            if self._affordable:
                return None
            self._fresh = max(int(_ISOLATED * self._budget), self._spacing(sample.errors))
        squares = np.square(sample.errors / sample.errors.max())
        if squares.sum() ** 2 < _MANY * np.square(squares).sum():
            return peak
        both = np.concatenate([top, peak])
        heights = self._errors.compare(both, self._zero).errors
        return both if heights[1] <= _PEAK_RATIO * heights[0] else top

    def _train(self, cross: CrossInterpolation, rounding: float) -> TensorTrain:
        """Return the train of the cross, rounded, in the precision of f."""
        rounded, _ = round_train(TensorTrain(cross.cores()), rounding, self._max_rank)
        return rounded.astype(self._f.dtype)

    def _estimate(self, cross: CrossInterpolation, train: TensorTrain, target: float) -> tuple[Sample, float]:
        """Return points of large errors and the estimated error.

        A few points suffice to reject an error above `target`; acceptance takes more, and a search for the largest.
        """
        calls = self._f.n_calls
        few, many = (int(min(max(least, part * calls), most)) for least, part, most in (_SAMPLES, _FINAL_SAMPLES))
        sample, error = self._errors.estimate(train, few, cross)
        points = self._crossings(cross, _CROSSINGS) if error > target else self._jumps(cross, train, many // 2)
        chosen = self._errors.compare(points, train)
        if error > target:
            each = min(_NEW_POINTS, max(cross.ranks) + 1) // 2
            return sample.largest(each, weighted=True) + chosen.largest(each), error
        climbs = max(_CLIMBS, many // sum(self._shape))
        peaks = np.concatenate([errors.largest(climbs // 2).points for errors in (sample, chosen)])
        for _ in range(2 if climbs * sum(self._shape) <= many else 1):
            peaks, profiles = self._errors.climb(peaks, train)
        heaviest, error = self._errors.estimate(train, many, cross, profiles)
        everywhere, lower_bound = self._errors.compare_evaluated(train)
        return (everywhere.largest(_NEW_POINTS), lower_bound) if lower_bound > error else (heaviest, error)

    def _test(self, train: TensorTrain, target: float) -> tuple[Sample, float]:
        """Return the largest errors at uniform points, fresh ones among them, and the error that all of them imply.

        Where these found an error, the next test has to pass at a multiple of the points that it took to find one.
        Where a third of all entries is known and the budget does not pay for the others, the test goes on to its end.
        """
        tested = min(_TESTED, int(_TESTED_BUDGET * self._budget)) - len(self._errors.uniform)
        count = max(int(_FRESH * self._f.n_calls), self._fresh, tested, *self._shape)
        affordable = min(count, self._f.remaining)
        sample, error = self._errors.compare_uniform(train, affordable)
        if error > target:
            self._fresh = max(self._fresh, self._spacing(sample.errors))
        elif affordable < self._fresh:
            raise CallBudgetExceeded
        while error <= target and self._is_known and not self._affordable:
            if self._f.remaining == 0:
                self._f.release()
            if self._f.remaining == 0:
                break
            sample, error = self._errors.compare_missing(train, min(count, self._f.remaining))
        self._missed_error = error if error > target else self._missed_error
        return sample.largest(_NEW_POINTS), error

    def _spacing(self, errors: Array) -> int:
        """Return a multiple of the number of uniform points for each of the large `errors` at the last of them."""
        return int(_REPEATED * len(self._errors.uniform) / np.count_nonzero(errors > 0.1 * errors.max()))

    def _grow(self, cross: CrossInterpolation, sample: Sample) -> bool:
        """Add pivots at points of large errors; False where these are roundoff."""
        roundoff = _ROUNDOFF * float(np.finfo(self._f.dtype).eps)
        return any(cross.grow(sample.points, part * sample.errors, roundoff) for part in _THRESHOLDS)

    def _jumps(self, cross: CrossInterpolation, train: TensorTrain, count: int) -> Array:
        """Return points beside jumps or kinks of the train, of up to `count` of the rows of all tables.

        A train that is right at every row of a table, whatever the legs on the right, is right everywhere.
        """
        sizes = [len(rows) * n for rows, n in zip(cross.rows, self._shape, strict=True)]
        numbers = self._rng.permutation(sum(sizes))[:count]
        heads, start = np.full((len(numbers), len(sizes)), -1), 0
        for k, size in enumerate(sizes):
            of_core = (start <= numbers) & (numbers < start + size)
            heads[of_core, : k + 1] = cross.indices(k, numbers[of_core] - start)
            start += size
        least, n_kinks = self._rtol * self._f.largest, len(heads) * sum(n > 2 for n in self._shape) // len(sizes)
        parts = (sample_kinks, heads[:n_kinks]), (sample_jumps, heads[n_kinks:])
        return np.concatenate([sample(train, part, least, self._rng) for sample, part in parts if len(part)])

    def _crossings(self, cross: CrossInterpolation, count: int) -> Array:
        """Return points between a row of one bond and a column of the next but one, their two own legs uniform."""
        d, rng = len(self._shape), self._rng
        points = []
        for k in rng.integers(0, d - 1, count if d > 1 else 0):
            row, column = rng.choice(cross.rows[k]), rng.choice(cross.columns[k + 1])
            points.append(np.concatenate([row, rng.integers(self._shape[k : k + 2]), column]))
        return np.array(points, np.intp).reshape(-1, d)
