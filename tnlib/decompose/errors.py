"""The error of a train against a function of indices, from samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib.decompose.asking import Values
from tnlib.formats.train import TensorTrain
from tnlib.linalg.scale import norm
from tnlib.ops.trains import take_apart
from tnlib.sweeps.cross import Cross
from tnlib.sweeps.entries import pick_entries
from tnlib.sweeps.sample import (
    draw,
    draw_beside,
    draw_products,
    log_density_beside,
    log_density_of_products,
    spread_out,
)

_SURE = 2.0  # standard errors
_HEAVIEST = 16  # points that a last estimate leaves to be mended


@dataclass
class Sample:
    """Points where a function and a train were compared."""

    points: Array  # (m, d)
    errors: Array  # (m,), moduli
    parts: Array  # (m,), errors as they count: at points that were likely to be drawn they stand for fewer others

    def __add__(self, other: Sample) -> Sample:
        pairs = ((self.points, other.points), (self.errors, other.errors), (self.parts, other.parts))
        return Sample(*map(np.concatenate, pairs))

    def largest(self, count: int) -> Sample:
        """Return the different points of the `count` largest errors."""
        return self._first(count, self.errors)

    def heaviest(self, count: int) -> Sample:
        """Return the different points of the `count` largest parts."""
        return self._first(count, self.parts)

    def _first(self, count: int, by: Array) -> Sample:
        first = np.unique(self.points, axis=0, return_index=True)[1]
        found = first[np.argsort(-by[first], kind="stable")[:count]]
        return Sample(self.points[found], self.errors[found], self.parts[found])


class Errors:
    """Errors of trains against the same function; which points they were looked for at is remembered."""

    def __init__(self, values: Values, shape: tuple[int, ...], rng: np.random.Generator) -> None:
        self._values, self._shape, self._rng = values, shape, rng
        self._sampled = np.empty((0, len(shape)), np.intp)

    def compare(self, points: Array, train: TensorTrain) -> Sample:
        """Return the errors at `points` (m, d)."""
        if len(points) == 0:
            return Sample(points, np.empty(0), np.empty(0))
        values = self._values(points)
        self._sampled = np.concatenate([self._sampled, points])
        errors = np.abs(values - _entries(train, points))
        return Sample(points, errors, errors)

    def again(self, train: TensorTrain) -> tuple[Sample, float]:
        """Return the errors at all points so far, and the part of norm(train) that these alone make."""
        self._sampled = np.unique(self._sampled, axis=0)
        errors = np.abs(self._values(self._sampled) - _entries(train, self._sampled))
        size = norm(errors)
        return Sample(self._sampled, errors, errors), math.exp(math.log(size) - train.log_norm()) if size > 0 else 0.0

    def estimate(
        self, train: TensorTrain, count: int, cross: Cross | None = None, lines: Sequence[Array] = ()
    ) -> tuple[Sample, float]:
        r"""Return a fresh sample of about `count` points, and the relative error estimated from it.

        With `lines`, the sample is that of the few points that contribute most to the error.

        Of N entries, those at points drawn with the density w / N tell norms without bias,

            norm(a)^2 = N <|a(i)|^2 / w(i)>,        w = (1 + N |t|^2 / norm(t)^2 + h + p + q) / 5

        for a part of them uniform, and a part drawn from the train t: the first see errors wherever they are many, the
        others those on the peaks of t. Densities h of points whose first or last legs are those of a row or a column of
        `cross` see errors in neighbourhoods of these, of all sizes. Products p of errors along `lines` through peaks of
        the error, and q of their means with constants, see errors around those peaks. What is not given is left out.
        """
        wide = [line + line.mean(axis=1, keepdims=True) for line in lines]
        beside = (
            [(cross.rows, [cross.columns[0][:0], *cross.columns], self._shape)]
            if cross and len(train.cores) > 1
            else []
        )
        each = count // (2 + len(beside) + 2 * bool(lines))
        drawn = [spread_out(self._shape, each, self._rng), draw(train.cores, each, self._rng)]
        drawn += [draw_products(some, each, self._rng) for some in (lines, wide) if some]
        drawn += [draw_beside(*some, each, self._rng) for some in beside]
        points = np.concatenate(drawn)
        sample, values = self.compare(points, train), np.abs(self._values(points))
        with np.errstate(divide="ignore"):
            t = np.log(np.abs(_entries(train, points)))
        logs = [np.zeros(len(points)), math.fsum(map(math.log, self._shape)) + 2 * (t - train.log_norm())]
        logs += [log_density_of_products(some, points) for some in (lines, wide) if some]
        logs += [log_density_beside(*some, points) for some in beside]
        log_w = np.logaddexp.reduce(logs, axis=0)
        weights, scale = np.exp(log_w.min() - log_w), self._values.largest
        lost, whole = np.square(sample.errors / scale) * weights, np.square(values / scale) * weights
        likely = lost.mean() + _SURE * lost.std() / math.sqrt(len(points))
        error = math.sqrt(likely / whole.mean()) if whole.any() else math.inf
        sample = Sample(points, sample.errors, sample.errors * np.sqrt(weights))
        return sample.heaviest(_HEAVIEST) if lines else sample, error

    def climb(self, points: Array, train: TensorTrain) -> tuple[Array, list[Array]]:
        """Move every point (m, d) to the largest error along each leg in turn.

        Return them, and for every leg the errors (m, n) along it, relative to the largest.
        """
        points, lines = points.copy(), [np.empty(0)] * len(self._shape)
        for k in self._rng.permutation(len(self._shape)):
            line = np.repeat(points, self._shape[k], axis=0)
            line[:, k] = np.tile(np.arange(self._shape[k]), len(points))
            errors = self.compare(line, train).errors.reshape(len(points), -1)  # m n
            points[:, k] = errors.argmax(axis=1)
            tops = errors.max(axis=1)
            lines[k] = errors / np.where(tops > 0, tops, 1)[:, None] + (tops == 0)[:, None]
        return points, lines


def _entries(train: TensorTrain, points: Array) -> Array:
    """Return the entries (m,) of `train` at `points` (m, d) in double precision."""
    cores, twos, factor = take_apart(train)
    wide = [core.astype(np.result_type(core, np.float64), copy=False) for core in cores]
    rows, e = pick_entries(wide, points)
    parts = np.ascontiguousarray(rows)[:, None].view(np.float64) * factor  # m, real and imaginary
    moved: Array = np.ldexp(parts, (e + twos)[:, None]).view(rows.dtype)[:, 0]
    return moved
