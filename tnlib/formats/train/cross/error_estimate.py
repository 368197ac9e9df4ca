"""Error of a train against a function of indices, estimated from samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib.formats.train.cross import sampling
from tnlib.formats.train.cross.cached_function import CachedFunction
from tnlib.formats.train.cross.interpolation import CrossInterpolation
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.operations import times_chosen, train_entries
from tnlib.linalg.scaling import norm, normalize_rows, shift

_STANDARD_ERRORS = 2.0  # added to the estimate
_REPEATED = 64  # times that a point may be in a sample
_CLIMB_SWEEPS = 64  # at most, of a climb, each along a part of the legs: its work is linear in their number
_HEAVIEST = 16  # points of a final estimate that are returned for further pivots


@dataclass
class Sample:
    """Errors at sampled points."""

    points: Array  # (m, d)
    errors: Array  # (m,), moduli
    weighted: Array  # (m,), errors times the root of the importance weight of their points

    def __add__(self, other: Sample) -> Sample:
        pairs = ((self.points, other.points), (self.errors, other.errors), (self.weighted, other.weighted))
        return Sample(*map(np.concatenate, pairs))

    def largest(self, count: int, *, weighted: bool = False) -> Sample:
        """Return the distinct points of the `count` largest errors, or weighted errors."""
        key = self.weighted if weighted else self.errors
        head = np.argsort(-key, kind="stable")[: _REPEATED * count]
        distinct = head[np.unique(self.points[head], axis=0, return_index=True)[1]]
        top = distinct[np.argsort(-key[distinct], kind="stable")[:count]]
        return Sample(self.points[top], self.errors[top], self.weighted[top])


class ErrorEstimator:
    """Errors of trains against one function; all uniform points are remembered."""

    def __init__(self, f: CachedFunction, shape: tuple[int, ...], rng: np.random.Generator) -> None:
        self._f, self._shape, self._rng = f, shape, rng
        self.uniform, self._values = np.empty((0, len(shape)), np.intp), np.empty(0)  # points, and the entries there

    def compare(self, points: Array, train: TensorTrain) -> Sample:
        """Return the errors at `points` (m, d)."""
        if len(points) == 0:
            return Sample(points, np.empty(0), np.empty(0))
        errors = np.abs(self._f(points) - entries(train, points))
        return Sample(points, errors, errors)

    def compare_evaluated(self, train: TensorTrain) -> tuple[Sample, float]:
        """Return the errors wherever f was evaluated, and their norm relative to that of the train: a lower bound."""
        points, values = self._f.evaluated()
        errors = np.abs(values - entries(train, points))
        return Sample(points, errors, errors), _ratio(errors, train)

    def compare_uniform(self, train: TensorTrain, count: int) -> tuple[Sample, float]:
        """Return the errors at `count` fresh and all earlier uniform points, and the relative error that they imply."""
        self.sample_uniform(count)
        errors = np.abs(self._values - entries(train, self.uniform))
        log_root = (math.fsum(map(math.log, self._shape)) - math.log(len(errors))) / 2
        return Sample(self.uniform, errors, errors), _ratio(errors, train, log_root)

    def compare_missing(self, train: TensorTrain, count: int) -> tuple[Sample, float]:
        """Return the errors at `count` points that were not evaluated, and the relative error that they imply."""
        missing = self._f.missing()
        sample = self.compare(self._rng.permutation(missing)[:count], train)
        log_root = math.log(len(missing) / len(sample.errors)) / 2
        return sample, max(self.compare_evaluated(train)[1], _ratio(sample.errors, train, log_root))

    def sample_uniform(self, count: int) -> Array:
        """Return `count` fresh uniform points (m, d)."""
        points = sampling.sample_uniform(self._shape, count, self._rng)
        self._values = np.concatenate([self._values, self._f(points)])
        self.uniform = np.concatenate([self.uniform, points])
        return points

    def estimate(
        self, train: TensorTrain, count: int, cross: CrossInterpolation | None = None, profiles: Sequence[Array] = ()
    ) -> tuple[Sample, float]:
        r"""Return a fresh sample of about `count` points, and the relative error estimated from it.

        With `profiles`, the sample is that of the few points that contribute most to the error.

        Of N entries, those at points drawn with the density w / N estimate norms without bias (importance sampling),

            norm(a)^2 = N <|a(i)|^2 / w(i)>,        w = (1 + N |t|^2 / norm(t)^2 + h + p + q) / 5.

        The uniform part finds errors that are frequent, the part drawn from the train t those on its peaks. The density
        h of points whose first or last legs are those of a row or a column of `cross` finds errors in neighbourhoods of
        these, of all sizes. Products p of errors along lines through peaks of the error (`profiles`), and q of their
        means with constants, find errors around those peaks. Densities without an argument are left out.
        """
        wide = [profile + profile.mean(axis=1, keepdims=True) for profile in profiles]
        products = [p for p in (list(profiles), wide) if p]
        beside = []
        if cross is not None and len(train.cores) > 1:
            beside = [(cross.rows, [cross.columns[0][:0], *cross.columns], self._shape)]
        each = count // (2 + len(beside) + len(products))
        drawn = [self.sample_uniform(each)]
        drawn += [sampling.sample_train(train.cores, each, self._rng)]
        drawn += [sampling.sample_products(p, each, self._rng) for p in products]
        drawn += [sampling.sample_beside(*neighbours, each, self._rng) for neighbours in beside]
        points = np.concatenate(drawn)
        sample, values = self.compare(points, train), np.abs(self._f(points))
        with np.errstate(divide="ignore"):
            t = np.log(np.abs(entries(train, points)))
        logs = [np.zeros(len(points)), math.fsum(map(math.log, self._shape)) + 2 * (t - train.log_norm())]
        logs += [sampling.log_density_of_products(p, points) for p in products]
        logs += [sampling.log_density_beside(*neighbours, points) for neighbours in beside]
        log_w = np.logaddexp.reduce(logs, axis=0)
        weights, scale = np.exp(log_w.min() - log_w), self._f.largest
        squares, total = np.square(sample.errors / scale) * weights, np.square(values / scale) * weights
        upper = squares.mean() + _STANDARD_ERRORS * squares.std() / math.sqrt(len(points))
        error = math.sqrt(upper / total.mean()) if total.any() else math.inf
        sample = Sample(points, sample.errors, sample.errors * np.sqrt(weights))
        return sample.largest(_HEAVIEST, weighted=True) if profiles else sample, error

    def climb(self, points: Array, train: TensorTrain) -> tuple[Array, list[Array]]:
        """Move every point (m, d) to the largest error along each leg in turn, in random order.

        Beyond 64 legs, a 64th of them at a time is taken from left to right.

        Return them, and for every leg the errors (m, n) along it, relative to the largest.
        """
        d, points, train = len(self._shape), points.copy(), _in_double(train)
        profiles = [np.empty(0)] * d
        for legs in np.array_split(self._rng.permutation(d), min(d, _CLIMB_SWEEPS)):
            self._climb_along(set(legs.tolist()), points, train, profiles)
        return points, profiles

    def _climb_along(self, legs: set[int], points: Array, train: TensorTrain, profiles: list[Array]) -> None:
        """Move `points` (m, d) along `legs`, from left to right; the products of the cores on both sides are kept."""
        m, d = points.shape
        right = [(np.ones((m, 1), train.dtype), np.full(m, train.exponent))]
        for core, chosen in zip(train.cores[:0:-1], points.T[:0:-1], strict=True):
            rows, e = normalize_rows(times_chosen(right[-1][0], core.transpose(2, 1, 0), chosen))
            right.append((rows, right[-1][1] + e))
        left, exponents = np.ones((m, 1), train.dtype), np.zeros(m, np.int64)
        for k, core in enumerate(train.cores):
            rows, e = right.pop()
            if k in legs:
                values = np.matvec(np.tensordot(left, core, axes=1), rows)  # m [l] n [r]
                line = np.repeat(points[:, None], self._shape[k], axis=1)  # m n d
                line[:, :, k] = np.arange(self._shape[k])
                wanted = self._f(line.reshape(-1, d)).reshape(m, -1)
                errors = np.abs(wanted - shift(values, (exponents + e)[:, None]))
                points[:, k] = errors.argmax(axis=1)
                peaks = errors.max(axis=1)
                profiles[k] = errors / np.where(peaks > 0, peaks, 1)[:, None] + (peaks == 0)[:, None]
            left, e = normalize_rows(times_chosen(left, core, points[:, k]))
            exponents = exponents + e


def _ratio(errors: Array, train: TensorTrain, log_factor: float = 0.0) -> float:
    """Return exp(log_factor) norm(errors) / norm(train)."""
    size = norm(errors)
    return math.exp(math.log(size) + log_factor - train.log_norm()) if size > 0 else 0.0


def entries(train: TensorTrain, points: Array) -> Array:
    """Return the entries (m,) of `train` at `points` (m, d) in double precision."""
    return shift(*train_entries(_in_double(train), points))


def _in_double(train: TensorTrain) -> TensorTrain:
    return train.astype(np.result_type(train.dtype, np.float64))
