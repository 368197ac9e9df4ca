"""A function of indices to a tensor train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentTypeError, ConvergenceWarning
from tnlib._fit import Fit, roundoff
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng, as_rtol, as_sizes
from tnlib.decompose.asking import BudgetSpent, Values, as_function
from tnlib.decompose.errors import Errors, Sample
from tnlib.formats.train import TensorTrain
from tnlib.ops.round import round
from tnlib.sweeps.cross import Cross
from tnlib.sweeps.sample import spread_out

_FIRST_SAMPLES = 512  # points for one to start from
_UNTIL_ZERO = 4096  # points where f is zero, for it to be zero
# Points that look for errors in every sweep, and those of the last estimate: at least, a part of all calls, at most.
_SAMPLES, _LAST_SAMPLES = (48, 1 / 32, 1024), (512, 1 / 8, 4096)
_KEPT_BACK = 1 / 8  # of the budget, for that estimate
_CROSSINGS = 32  # points between the pivots of two bonds that are tried in every sweep
_SPREAD = 16  # points at least that carry the norm of the first sample where f has no peak
_FAR = 100.0  # times the largest of the first sample
_STARTS = 4  # of the search for errors that ends it
_POINTS = 4  # added at a time, and no more than the rank
_THRESHOLDS = (3e-3, 3e-4, 3e-5, 3e-6)  # of the error at a point: smaller terms of it are left for later
_ROUNDOFF = 8  # eps of the values beside a residual: it is none below that
_AIM = 0.7  # of rtol: an error that is rare shows in few samples
_ROUNDING, _LEAST_ROUNDING = 0.4, 0.01  # of rtol


def tt_cross(
    f: Callable[[Array], Any],
    shape: Sequence[int],
    *,
    rtol: float,
    max_calls: int = 1_000_000,
    rng: np.random.Generator | int | None = None,
) -> Fit[TensorTrain]:
    """Find a train of the tensor f(i) with norm(x - fit.value.full()) <= rtol * norm(x), as far as samples tell.

    Parameters
    ----------
    f
        Takes an integer array (n_points, d) of indices and returns (n_points,) numbers, real or complex. It is asked
        for each index once.
    shape
        (n[0], ..., n[d-1]), the sizes of the legs.
    rtol
        Relative Frobenius error of the whole.
    max_calls
        How many points f may be asked for, samples of the error included. Where that is not enough, the best train so
        far is returned, not converged, with a ConvergenceWarning.
    rng
        A numpy random generator or a seed for it; None always draws the same numbers.

    Returns
    -------
    Fit[TensorTrain]
        Left-canonical with the last core as centre, rounded to rtol. `error` is an estimate and `certified` False: the
        root mean square of f - train over fresh random indices, half of them uniform and half drawn from abs(train)^2,
        weighted so that its expectation is the Frobenius norm, plus two standard errors. What occupies so few
        indices that neither samples nor searches from them meet it stays unseen.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If f returns another shape or kind, NaN or inf, or an argument is off. What f raises itself passes through.

    References
    ----------
    I. V. Oseledets, E. E. Tyrtyshnikov, "TT-cross approximation for multidimensional arrays", Linear Algebra Appl.
    432 (2010); Y. Nunez Fernandez et al., "Learning tensor networks with tensor cross interpolation", SciPost Phys. 18
    (2025), for pivots from errors of the whole; A. J. Ferris, G. Vidal, "Perfect sampling with unitary tensor
    networks", Phys. Rev. B 85 (2012).

    Examples
    --------
    The Boltzmann weights of an Ising chain of 50 spins are a train of rank 2, the transfer matrix; its norm is that of
    the chain at twice the coupling.

    >>> import numpy as np, tnlib
    >>> def weights(spins):
    ...     s = 2 * spins - 1
    ...     return np.exp(0.4 * (s[:, 1:] * s[:, :-1]).sum(axis=1))
    >>> fit = tnlib.tt_cross(weights, (2,) * 50, rtol=1e-10)
    >>> max(fit.value.ranks), fit.converged
    (2, True)
    >>> z = 2 * (2 * np.cosh(0.8)) ** 49
    >>> f"{fit.value.norm() ** 2 / z:.9f}"
    '1.000000000'
    """
    f, shape = as_function("tt_cross", f), as_sizes("tt_cross", "shape", shape)
    tolerance, max_calls = as_rtol("tt_cross", rtol), as_count("tt_cross", "max_calls", max_calls)
    if tolerance is None:
        raise ArgumentTypeError("tt_cross: rtol must be a real number, got None; pass for example rtol=1e-6.")
    values = Values("tt_cross", f, shape, max_calls, keep_back=int(_KEPT_BACK * max_calls))
    search = _Search(values, shape, tolerance, as_rng("tt_cross", rng))
    try:
        search.run()
        missed = "no index was found that mends it; f may be rounded that much, otherwise try another rng"
    except BudgetSpent:
        missed = f"max_calls={max_calls} is spent"
    best = search.finish()
    if not best.converged:
        text = f"tt_cross: the error is estimated as {best.error:.3g} and misses rtol={tolerance:.3g}: {missed}."
        warnings.warn(text, ConvergenceWarning, stacklevel=2)
    return best


class _Search:
    """A cross that grows where samples find errors, until they find none that matter."""

    def __init__(self, values: Values, shape: tuple[int, ...], rtol: float, rng: np.random.Generator) -> None:
        self._values, self._shape, self._rtol, self._rng = values, shape, rtol, rng
        self._errors = Errors(values, shape, rng)
        self._zero = round(TensorTrain([np.zeros((1, n, 1)) for n in shape])).value
        self._best = Fit(self._zero, 1.0, False, False, 0)
        self._cross: Cross | None = None

    def run(self) -> None:
        """Iterate until the best train has converged, or f has no more to say; BudgetSpent where that is too long."""
        start = self._start()
        if start is None:
            note = f"f is zero at all of the {self._values.n_calls} points that it was asked for"
            self._best = Fit(self._zero, 0.0, False, True, 0, (note,))
            return
        self._cross = cross = Cross(self._values, self._shape, start[0])
        if len(start) > 1:
            self._grow(cross, self._errors.compare(start, self._zero))
        n_iter, rounding = 0, _ROUNDING * self._rtol
        while True:
            train = self._train(cross, rounding)
            sample, error, done = self._look(cross, train)
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
        """Return the best train; where the iteration was cut short, with an estimate by what is left of the budget."""
        best = self._best
        self._values.release()
        count = min(_LAST_SAMPLES[0], self._values.left)
        if best.converged or best.error == 1.0 or count < _SAMPLES[0]:
            return best
        error = self._errors.estimate(best.value, count, self._cross)[1]
        return Fit(best.value, error, False, error <= self._rtol, best.n_iter)

    def _start(self) -> Array | None:
        """Return indices (m, d) where |f| is large, None where it seems to be zero.

        Where the norm of f is seen to be that of few points, it is a peak that is climbed to. Where it is that of many,
        the largest of them comes first, and a peak must not be all there is to begin from: it may lie in a corner that
        makes no difference. Far above all others, it would spoil their digits.
        """
        for count in (_FIRST_SAMPLES, min(_UNTIL_ZERO, self._values.left)):
            sample = self._errors.compare(spread_out(self._shape, count, self._rng), self._zero)
            if sample.errors.any():
                top = sample.largest(1).points
                peak = self._errors.climb(top, self._zero)[0]
                squares = np.square(sample.errors / sample.errors.max())
                if squares.sum() ** 2 < _SPREAD * np.square(squares).sum():
                    return peak
                both = np.concatenate([top, peak])
                heights = self._errors.compare(both, self._zero).errors
                return both if heights[1] <= _FAR * heights[0] else top
        return None

    def _train(self, cross: Cross, rounding: float) -> TensorTrain:
        """Return the train of the cross, rounded, in the precision of f."""
        train = round(TensorTrain(cross.cores()), rtol=rounding).value
        return TensorTrain([core.astype(self._values.dtype) for core in train.cores], train.center, train.log_scale)

    def _look(self, cross: Cross, train: TensorTrain) -> tuple[Sample, float, bool]:
        """Return points of large errors, the error estimated, and whether that is all that can be found.

        A few points tell a train that is not good enough, more of them and a search for the largest errors one that is.
        """
        target = max(_AIM * self._rtol, roundoff(train.dtype, len(self._shape) + 1))
        asked = self._values.n_calls
        few, many = (int(min(max(least, part * asked), most)) for least, part, most in (_SAMPLES, _LAST_SAMPLES))
        sample, error = self._errors.estimate(train, few, cross)
        found = self._errors.compare(self._crossings(cross, _CROSSINGS if error > target else many), train)
        if error > target:
            each = min(_POINTS, max(cross.ranks) + 1) // 2
            return sample.heaviest(each) + found.largest(each), error, False
        starts = max(_STARTS, many // sum(self._shape))
        tops = np.concatenate([some.largest(starts // 2).points for some in (sample, found)])
        for _ in range(2 if starts * sum(self._shape) <= many else 1):
            tops, lines = self._errors.climb(tops, train)
        heaviest, error = self._errors.estimate(train, many, cross, lines)
        everything, known = self._errors.again(train)
        if known > error:
            heaviest, error = everything.largest(_POINTS), known
        return heaviest, error, error <= target

    def _grow(self, cross: Cross, sample: Sample) -> bool:
        """Make the cross right at points of large errors; False where they are roundoff."""
        roundoff = _ROUNDOFF * float(np.finfo(self._values.dtype).eps)
        return any(cross.grow(sample.points, part * sample.errors, roundoff) for part in _THRESHOLDS)

    def _crossings(self, cross: Cross, count: int) -> Array:
        """Return points between a row of one bond and a column of the next but one, their two own legs drawn."""
        d, rng = len(self._shape), self._rng
        found = []
        for k in rng.integers(0, d - 1, count if d > 1 else 0):
            row, column = rng.choice(cross.rows[k]), rng.choice(cross.columns[k + 1])
            found.append(np.concatenate([row, rng.integers(self._shape[k : k + 2]), column]))
        return np.array(found, np.intp).reshape(-1, d)
