"""A function of indices to a tensor train."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentTypeError, ConvergenceWarning
from tnlib._fit import Fit, roundoff
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng, as_rtol, as_sizes
from tnlib.decompose.asking import BudgetSpent, Values, as_function
from tnlib.formats.train import TensorTrain
from tnlib.linalg.scale import norm, shift
from tnlib.ops.round import round
from tnlib.ops.trains import take_apart
from tnlib.sweeps.cross import Cross
from tnlib.sweeps.sample import draw, draw_products, entries, log_density_of_products, spread_out

_FIRST_SAMPLES = 256  # points for one to start from
_SAMPLES = 48  # points that look for errors in every sweep, or this part of all calls:
_PART = 1 / 32
_LAST_SAMPLES = 512  # points of the estimate that ends it, or this part of all calls:
_LAST_PART = 1 / 8
_UNTIL_ZERO = 4096  # points where f is zero, for it to be zero
_POINTS = 8  # added at a time, and no more than the rank
_CROSSINGS = 32  # points between the pivots of two bonds that are tried, or as many as points in every sweep
_STARTS = 4  # of the search for errors that ends it
_THRESHOLDS = (3e-3, 3e-4, 3e-5, 3e-6)  # of the largest error found: smaller terms of it are left for later
_ROUNDOFF = 8  # eps of max|f|: residuals below are none
_SURE = 2.0  # standard errors
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
        root mean square of f - train over fresh random indices, half of them uniform and half drawn from |train|^2,
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
    rtol_or_none, max_calls = as_rtol("tt_cross", rtol), as_count("tt_cross", "max_calls", max_calls)
    if rtol_or_none is None:
        raise ArgumentTypeError("tt_cross: rtol must be a real number, got None; pass for example rtol=1e-6.")
    search = _Search(Values("tt_cross", f, shape, max_calls), shape, rtol_or_none, as_rng("tt_cross", rng))
    try:
        search.run()
        missed = "no more can be learned from f, whose own rounding errors may be that large"
    except BudgetSpent:
        missed = f"max_calls={max_calls} is spent"
    best = search.best
    if not best.converged:
        text = f"tt_cross: the error is estimated as {best.error:.3g}, rtol={rtol:.3g} is missed: {missed}."
        warnings.warn(text, ConvergenceWarning, stacklevel=2)
    return best


@dataclass
class _Sample:
    """Points where f and a train were compared."""

    points: Array  # (m, d)
    errors: Array  # (m,), moduli

    def __add__(self, other: _Sample) -> _Sample:
        return _Sample(np.concatenate([self.points, other.points]), np.concatenate([self.errors, other.errors]))


class _Search:
    """A cross that grows where samples find errors, until they find none that matter."""

    def __init__(self, values: Values, shape: tuple[int, ...], rtol: float, rng: np.random.Generator) -> None:
        self.values, self.shape, self.rtol, self.rng = values, shape, rtol, rng
        self.n_iter, self.rounding = 0, _ROUNDING * rtol
        self.sampled: list[Array] = []  # points that f and a train were compared at
        self.zero = round(TensorTrain([np.zeros((1, n, 1)) for n in shape])).value
        self.best = Fit(self.zero, 1.0, False, False, 0)

    def run(self) -> None:
        """Iterate until `best` has converged, or f has no more to say; BudgetSpent where that takes too long."""
        start = self._start()
        if start is None:
            note = f"f is zero at all of the {self.values.n_calls} points that it was asked for"
            self.best = Fit(self.zero, 0.0, False, True, 0, (note,))
            return
        cross = Cross(self.values, self.shape, start)
        while True:
            train = self._train(cross)
            sample, error, done = self._look(cross, train)
            if done or error < self.best.error:
                self.best = Fit(train, error, False, done or error <= self.rtol, self.n_iter)
            if done:
                return
            if not self._grow(cross, sample):
                if self.rounding < _LEAST_ROUNDING * self.rtol:
                    return
                self.rounding /= 4  # the error was that of rounding
            self.n_iter += 1

    def _start(self) -> Array | None:
        """Return an index where |f| is large, None where it seems to be zero."""
        for count in (_FIRST_SAMPLES, min(_UNTIL_ZERO, self.values.left)):
            points = spread_out(self.shape, count, self.rng)
            found = self._compare(points, self.zero)
            if found.errors.any():
                best = found.points[[int(np.argmax(found.errors))]]
                top: Array = self._climb(best, self.zero)[0].points[0]
                return top
        return None

    def _train(self, cross: Cross) -> TensorTrain:
        """Return the train of the cross, rounded, in the precision of f."""
        train = round(TensorTrain(cross.cores()), rtol=self.rounding).value
        dtype = self.values.dtype
        return TensorTrain([core.astype(dtype) for core in train.cores], train.center, train.log_scale)

    def _look(self, cross: Cross, train: TensorTrain) -> tuple[_Sample, float, bool]:
        """Return a sample of errors, the error estimated from it, and whether that is all that can be found.

        A few points tell a train that is not good enough, more of them and a search for the largest errors one that is.
        """
        target = max(_AIM * self.rtol, roundoff(train.dtype, len(self.shape) + 1))
        sample, error = self._estimate(train, max(_SAMPLES, int(_PART * self.values.n_calls)))
        if error > target:
            return sample + self._compare(self._crossings(cross, _CROSSINGS), train), error, False
        found = self._compare(self._crossings(cross, max(_CROSSINGS, int(_PART * self.values.n_calls))), train)
        starts = [some.points[np.argsort(-some.errors)[: _STARTS // 2]] for some in (sample, found)]
        _, lines = self._climb(np.concatenate(starts), train)
        _, error = self._estimate(train, max(_LAST_SAMPLES, int(_LAST_PART * self.values.n_calls)), lines)
        sample, held = self._again(train)
        error = max(error, held)
        return sample, error, error <= target

    def _estimate(self, train: TensorTrain, count: int, lines: Sequence[Array] = ()) -> tuple[_Sample, float]:
        r"""Return a fresh sample and the error estimated from it.

        Of N entries, those at points drawn with the density w / N tell norms without bias,

            norm(a)^2 = N <|a(i)|^2 / w(i)>,        w = (1 + N |t|^2 / norm(t)^2 + p + q) / 4

        for a quarter of them uniform, and a quarter drawn from the train t: the first see errors wherever they are
        many, the others those on the peaks of t. Products p of errors along `lines` through peaks of the error, and q
        of their means with constants, see errors around those peaks; without lines they are left out.
        """
        wide = [line + line.mean(axis=1, keepdims=True) for line in lines]
        each = count // (4 if lines else 2)
        drawn = [spread_out(self.shape, each, self.rng), draw(train.cores, each, self.rng)]
        drawn += [draw_products(some, each, self.rng) for some in (lines, wide) if some]
        points = np.concatenate(drawn)
        self.sampled.append(points)
        t, f = self._entries(train, points), self.values(points)
        with np.errstate(divide="ignore"):
            from_train = math.fsum(map(math.log, self.shape)) + 2 * (np.log(np.abs(t)) - train.log_norm())
        logs = [np.zeros(len(points)), from_train]
        logs += [log_density_of_products(some, points) for some in (lines, wide) if some]
        log_w = np.logaddexp.reduce(logs, axis=0) - math.log(len(logs))
        scale, errors = self.values.largest, np.abs(f - t)
        weights = np.exp(log_w.min() - log_w)
        lost, whole = np.square(errors / scale) * weights, np.square(np.abs(f) / scale) * weights
        likely = lost.mean() + _SURE * lost.std() / math.sqrt(len(points))
        return _Sample(points, errors), math.sqrt(likely / whole.mean()) if whole.any() else math.inf

    def _grow(self, cross: Cross, sample: _Sample) -> bool:
        """Make the cross right where the largest errors are known; False where they are roundoff."""
        points, first = np.unique(sample.points, axis=0, return_index=True)
        errors = sample.errors[first]
        order = np.argsort(-errors)[: min(_POINTS, max(cross.ranks))]
        least = _ROUNDOFF * float(np.finfo(self.values.dtype or float).eps) * self.values.largest
        return any(cross.grow(points[order], part * float(errors[order[0]]), least) for part in _THRESHOLDS)

    def _crossings(self, cross: Cross, count: int) -> Array:
        """Return points between a row of one bond and a column of the next but one, their two own legs drawn."""
        d, rng = len(self.shape), self.rng
        found = []
        for k in rng.integers(0, d - 1, count if d > 1 else 0):
            row, column = rng.choice(cross.rows[k]), rng.choice(cross.columns[k + 1])
            found.append(np.concatenate([row, rng.integers(self.shape[k : k + 2]), column]))
        return np.array(found, np.intp).reshape(-1, d)

    def _climb(self, points: Array, train: TensorTrain) -> tuple[_Sample, list[Array]]:
        """Move every point to the largest error along each leg in turn; return them, and for every leg the errors."""
        points, lines = points.copy(), [np.empty(0)] * len(self.shape)
        for k in self.rng.permutation(len(self.shape)):
            line = np.repeat(points, self.shape[k], axis=0)
            line[:, k] = np.tile(np.arange(self.shape[k]), len(points))
            errors = self._compare(line, train).errors.reshape(len(points), -1)  # m n
            points[:, k] = errors.argmax(axis=1)
            tops = errors.max(axis=1)
            lines[k] = errors / np.where(tops > 0, tops, 1)[:, None] + (tops == 0)[:, None]
        return _Sample(points, tops), lines

    def _again(self, train: TensorTrain) -> tuple[_Sample, float]:
        """Return all samples so far with the errors of this train there, and the error that these alone make."""
        points = np.unique(np.concatenate(self.sampled), axis=0)
        sample, self.sampled = self._compare(points, train), [points]
        size = norm(sample.errors)
        return sample, math.exp(math.log(size) - train.log_norm()) if size > 0 else 0.0

    def _compare(self, points: Array, train: TensorTrain) -> _Sample:
        self.sampled.append(points)
        return _Sample(points, np.abs(self.values(points) - self._entries(train, points)))

    @staticmethod
    def _entries(train: TensorTrain, points: Array) -> Array:
        cores, twos, factor = take_apart(train)
        return shift(
            entries([core.astype(np.result_type(core, np.float64), copy=False) for core in cores], points) * factor,
            twos,
        )
