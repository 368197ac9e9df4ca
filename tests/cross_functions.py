"""Functions of indices for tt_cross, counted, and what every result of it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracles

import tnlib

Function = Callable[[np.ndarray], np.ndarray]


class Counted:
    """A function that remembers what it was asked."""

    def __init__(self, f: Function) -> None:
        self.f, self.n, self.seen = f, 0, set()

    def __call__(self, points: np.ndarray) -> np.ndarray:
        self.n += len(points)
        self.seen |= {tuple(point) for point in points.tolist()}
        return self.f(points)


def of(x: np.ndarray) -> Function:
    return lambda points: x[tuple(points.T)]


def of_train(cores: Sequence[np.ndarray]) -> Function:
    def f(points: np.ndarray) -> np.ndarray:
        out = np.ones((len(points), 1))
        for core, leg in zip(cores, points.T, strict=True):
            out = np.einsum("ml,lmr->mr", out, core[:, leg])
        return out[:, 0]

    return f


def place(points: np.ndarray) -> np.ndarray:
    """The number in [0, 1) whose binary digits are the indices."""
    return points @ 0.5 ** np.arange(1.0, points.shape[1] + 1)


def sampled_error(f: Function, value: tnlib.TensorTrain, count: int = 50_000, seed: int = 77) -> float:
    """The relative error over uniform indices that tt_cross never saw."""
    rng = np.random.default_rng(seed)
    points = np.stack([rng.integers(0, n, count) for n in value.shape], axis=1)
    got = of_train([np.asarray(core) for core in value.cores])(points) * math.exp(value.log_scale)
    want = f(points)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def solve(f: Function, shape: Sequence[int], rtol: float, **options: Any) -> tuple[Any, Counted]:
    """Run, and hold what every result holds, converged or not."""
    counted = Counted(f)
    fit, warned = oracles.quietly(lambda: tnlib.tt_cross(counted, shape, rtol=rtol, **options))
    assert isinstance(fit.value, tnlib.TensorTrain)
    assert fit.value.shape == tuple(shape)
    assert fit.certified <= (counted.n == math.prod(shape)), "only whole tensors are certified"
    assert any("at a confidence of 0.99" in note for note in fit.notes) == (not fit.certified)
    assert fit.error >= 0
    assert (tnlib.ConvergenceWarning in warned) == (not fit.converged)
    assert set(warned) <= {tnlib.ConvergenceWarning}
    assert counted.n == len(counted.seen), "an index was asked for twice"
    assert all(0 <= i < n for point in counted.seen for i, n in zip(point, shape, strict=True))
    oracles.assert_gauge(fit.value)
    return fit, counted
