"""Rotary planes of narrower queries and keys, and the frequencies that the narrower head has.

A head of d columns rotates plane j by the frequency b^(-2 j / d). The planes start, start + step, ... of it have the
frequencies of a head of d' columns with another base b' and a common factor:

    b^(-2 (start + step j) / d) = b'^(-2 j / d') / f,      b' = b^(step d' / d),   f = b^(2 start / d).

f is the factor of the linear scaling of positions, which config.json states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array


@dataclass(frozen=True)
class RotaryPlanes:
    """Planes start, start + step, ..., `count` of them, of the `n_planes` of a head that rotates all its columns."""

    start: int
    step: int
    count: int
    n_planes: int

    @property
    def indices(self) -> Array:
        """Indices of the planes."""
        return self.start + self.step * np.arange(self.count)

    @property
    def columns(self) -> Array:
        """Columns of a head, in the order of the narrower head: those of plane j are j and n_planes + j."""
        return np.concatenate([self.indices, self.n_planes + self.indices])

    def base(self, base: float) -> float:
        """Return the base of the frequencies of the narrower head."""
        return float(base ** (self.step * self.count / self.n_planes))

    def factor(self, base: float) -> float:
        """Return the factor by which positions are divided."""
        return float(base ** (self.start / self.n_planes))


def choose_planes(losses: Array, count: int) -> RotaryPlanes:
    """Return the equally spaced planes without which most is lost.

    >>> choose_planes(np.array([5.0, 1.0, 4.0, 0.0]), 2).indices.tolist()
    [0, 2]
    """
    return max(_progressions(len(losses), count), key=lambda planes: float(losses[planes.indices].sum()))


def _progressions(n_planes: int, count: int) -> Iterator[RotaryPlanes]:
    widest = (n_planes - 1) // (count - 1) if count > 1 else 1
    for step in range(1, widest + 1):
        for start in range(n_planes - step * (count - 1)):
            yield RotaryPlanes(start, step, count, n_planes)
