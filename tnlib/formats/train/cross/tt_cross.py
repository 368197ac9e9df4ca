"""TT-cross: a function of indices to a tensor train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentTypeError, ConvergenceWarning
from tnlib._fit import Fit, roundoff
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng, as_rtol, as_sizes
from tnlib.formats.train.cross.cached_function import CachedFunction, CallBudgetExceeded
from tnlib.formats.train.cross.error_estimate import ErrorEstimator, Sample
from tnlib.formats.train.cross.interpolation import CrossInterpolation
from tnlib.formats.train.cross.sampling import sample_uniform
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.round import round_train

_FIRST_SAMPLES = 512  # points from which the first pivot is taken
_ZERO_SAMPLES = 4096  # points at which f is zero, for it to count as zero
# Points of the error estimate in every sweep, and of the final one: at least, part of all calls, at most.
_SAMPLES, _FINAL_SAMPLES = (48, 1 / 32, 1024), (512, 1 / 8, 4096)
_RESERVED = 1 / 8  # of the budget, for the final estimate
_CROSSINGS = 32  # points between the pivots of two bonds that are tried in every sweep
_MANY = 16  # effective number of points that carry the norm of the first sample where f has no peak
_PEAK_RATIO = 100.0  # between a peak and the largest of the first sample, above which the peak is no pivot
_CLIMBS = 4  # starting points of the final search for errors
_NEW_POINTS = 4  # added at a time, and no more than the rank
_THRESHOLDS = (
    3e-3,
    3e-4,
    3e-5,
    3e-6,
)  # fractions of the error at a point; smaller terms of it get no pivot; tried one after the other
_ROUNDOFF = 8  # eps of the values beside a residual, below which it is roundoff
_TARGET = 0.7  # of rtol: few samples underestimate rare errors
_ROUNDING, _LEAST_ROUNDING = 0.4, 0.01  # of rtol


def tt_cross(
    f: Callable[[Array], Any],
    shape: Sequence[int],
    *,
    rtol: float,
    max_calls: int = 1_000_000,
    rng: np.random.Generator | int | None = None,
) -> Fit[TensorTrain]:
    """Interpolate the tensor x[i] = f(i) by a train so that norm(x - fit.value.full()) <= rtol * norm(x), as estimated.

    Parameters
    ----------
    f
        Takes an integer array (n_points, d) of indices and returns (n_points,) numbers, real or complex. Each index is
        evaluated once.
    shape
        (n[0], ..., n[d-1]), the sizes of the legs.
    rtol
        Relative Frobenius error of the whole.
    max_calls
        Number of points at which f may be evaluated, samples of the error included. Where it is too small, the best
        train so far is returned with a ConvergenceWarning.
    rng
        A numpy random generator or a seed for it; None always draws the same numbers.

    Returns
    -------
    Fit[TensorTrain]
        Left-canonical with the last core as centre, rounded to rtol. `error` is an estimate and `certified` False: the
        root mean square of f - train over fresh random indices, half of them uniform and half drawn from abs(train)^2,
        weighted so that its expectation is the Frobenius norm, plus two standard errors. A feature on so few indices
        that neither samples nor searches from them meet it is missed.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If f returns another shape or kind, NaN or inf, or an argument is off. Exceptions of f pass through.

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
    tolerance = as_rtol("tt_cross", rtol)
    if tolerance is None:
        raise ArgumentTypeError("tt_cross: rtol must be a real number, got None; pass for example rtol=1e-6.")
    cached = CachedFunction("tt_cross", f, shape, max_calls, reserved=int(_RESERVED * max_calls))
    search = _Search(cached, shape, tolerance, as_rng("tt_cross", rng))
    try:
        search.run()
        reason = "no pivot lowers it; f may be rounded that much, otherwise try another rng"
    except CallBudgetExceeded:
        reason = f"max_calls={max_calls} is spent"
    best = search.finish()
    if not best.converged:
        text = f"tt_cross: the error is estimated as {best.error:.3g} and misses rtol={tolerance:.3g}: {reason}."
        warnings.warn(text, ConvergenceWarning, stacklevel=2)
    return best


class _Search:
    """A cross interpolation that adds pivots at sampled errors until the errors are within the tolerance."""

    def __init__(self, f: CachedFunction, shape: tuple[int, ...], rtol: float, rng: np.random.Generator) -> None:
        self._f, self._shape, self._rtol, self._rng = f, shape, rtol, rng
        self._errors = ErrorEstimator(f, shape, rng)
        self._zero = round_train(TensorTrain([np.zeros((1, n, 1)) for n in shape]), None, None)[0].fused()
        self._best = Fit(self._zero, 1.0, False, False, 0)
        self._cross: CrossInterpolation | None = None

    def run(self) -> None:
        """Iterate until the train has converged, or no pivot lowers the error; CallBudgetExceeded at the budget."""
        start = self._initial_points()
        if start is None:
            note = f"f is zero at all of the {self._f.n_calls} points where it was evaluated"
            self._best = Fit(self._zero, 0.0, False, True, 0, (note,))
            return
        self._cross = cross = CrossInterpolation(self._f, self._shape, start[0])
        if len(start) > 1:
            self._grow(cross, self._errors.compare(start, self._zero))
        n_iter, rounding = 0, _ROUNDING * self._rtol
        while True:
            train = self._train(cross, rounding)
            sample, error, done = self._estimate(cross, train)
            if done or error < self._best.error:
                self._best = Fit(train, error, False, done, n_iter)
            if done:
                return
            if not self._grow(cross, sample):
                if rounding <= _LEAST_ROUNDING * self._rtol:
                    return
                rounding /= 4  # the error was that of rounding
            n_iter += 1

    def finish(self) -> Fit[TensorTrain]:
        """Return the best train; after an interruption, with an estimate from the rest of the budget."""
        best = self._best
        self._f.release()
        count = min(_FINAL_SAMPLES[0], self._f.remaining)
        if best.converged or best.error == 1.0 or count < _SAMPLES[0]:
            return best
        error = self._errors.estimate(best.value, count, self._cross)[1]
        return Fit(best.value, error, False, error <= self._rtol, best.n_iter)

    def _initial_points(self) -> Array | None:
        """Return indices (m, d) where |f| is large, None where it seems to be zero.

        Where few points carry the norm of the first sample, f has a peak, the first pivot. Where many do, the largest
        of them is the first pivot and the peak the second, unless it is so far above all others that it spoils digits.
        """
        for count in (_FIRST_SAMPLES, min(_ZERO_SAMPLES, self._f.remaining)):
            sample = self._errors.compare(sample_uniform(self._shape, count, self._rng), self._zero)
            if sample.errors.any():
                top = sample.largest(1).points
                peak = self._errors.climb(top, self._zero)[0]
                squares = np.square(sample.errors / sample.errors.max())
                if squares.sum() ** 2 < _MANY * np.square(squares).sum():
                    return peak
                both = np.concatenate([top, peak])
                heights = self._errors.compare(both, self._zero).errors
                return both if heights[1] <= _PEAK_RATIO * heights[0] else top
        return None

    def _train(self, cross: CrossInterpolation, rounding: float) -> TensorTrain:
        """Return the train of the cross, rounded, in the precision of f."""
        rounded, _ = round_train(TensorTrain(cross.cores()), rounding, None)
        return rounded.fused().astype(self._f.dtype)

    def _estimate(self, cross: CrossInterpolation, train: TensorTrain) -> tuple[Sample, float, bool]:
        """Return points of large errors, the estimated error, and True if it is small enough.

        A few points suffice to reject an error; acceptance takes more, and a search for the largest errors.
        """
        target = max(_TARGET * self._rtol, roundoff(train.dtype, len(self._shape) + 1))
        calls = self._f.n_calls
        few, many = (int(min(max(least, part * calls), most)) for least, part, most in (_SAMPLES, _FINAL_SAMPLES))
        sample, error = self._errors.estimate(train, few, cross)
        crossings = self._crossings(cross, _CROSSINGS if error > target else many)
        at_crossings = self._errors.compare(crossings, train)
        if error > target:
            each = min(_NEW_POINTS, max(cross.ranks) + 1) // 2
            return sample.largest(each, weighted=True) + at_crossings.largest(each), error, False
        climbs = max(_CLIMBS, many // sum(self._shape))
        peaks = np.concatenate([errors.largest(climbs // 2).points for errors in (sample, at_crossings)])
        for _ in range(2 if climbs * sum(self._shape) <= many else 1):
            peaks, profiles = self._errors.climb(peaks, train)
        heaviest, error = self._errors.estimate(train, many, cross, profiles)
        everywhere, lower_bound = self._errors.compare_all(train)
        if lower_bound > error:
            heaviest, error = everywhere.largest(_NEW_POINTS), lower_bound
        return heaviest, error, error <= target

    def _grow(self, cross: CrossInterpolation, sample: Sample) -> bool:
        """Add pivots at points of large errors; False where these are roundoff."""
        roundoff = _ROUNDOFF * float(np.finfo(self._f.dtype).eps)
        return any(cross.grow(sample.points, part * sample.errors, roundoff) for part in _THRESHOLDS)

    def _crossings(self, cross: CrossInterpolation, count: int) -> Array:
        """Return points between a row of one bond and a column of the next but one, their two own legs uniform."""
        d, rng = len(self._shape), self._rng
        points = []
        for k in rng.integers(0, d - 1, count if d > 1 else 0):
            row, column = rng.choice(cross.rows[k]), rng.choice(cross.columns[k + 1])
            points.append(np.concatenate([row, rng.integers(self._shape[k : k + 2]), column]))
        return np.array(points, np.intp).reshape(-1, d)
