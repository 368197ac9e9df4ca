"""Functions that are hard for TT-cross, in several seeds: how many results are right, and how many only claim to be.

    python -m benchmarks.hard_functions [SEEDS [WORD]]

prints a row per function (those whose name contains WORD), for SEEDS seeds (3): the median number of evaluations, the
largest error, and how many results are right, falsely converged (beyond three times the tolerance), not converged, and
over two minutes of CPU time. The last row is that of the sums.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import tnlib
from benchmarks.crosses import Function, digits

_LONGEST_SECONDS = 120.0
_FALSE = 3.0  # times rtol: a converged result with a larger error is false
_WHOLE = 1 << 22  # entries up to which the error is that of all
_POINTS = 1 << 16


@dataclass(frozen=True)
class Hard:
    """A function of indices, its tolerance, and for narrow ones the number in [0, 1) that they peak at, or samples."""

    name: str
    f: Function
    shape: tuple[int, ...]
    rtol: float = 1e-6
    peak: float | None = None
    draw: Callable[[np.random.Generator, int], np.ndarray] | None = None  # indices with the probability of f^2
    exact: Callable[[], tnlib.TensorTrain] | None = None


def _centred(points: np.ndarray, n: int, width: float) -> np.ndarray:
    return width * (2 * points / (n - 1) - 1)


def _gaussian(points: np.ndarray) -> np.ndarray:
    x = _centred(points, 50, 3)
    return np.exp(-(np.square(x).sum(axis=1) + np.square(x.sum(axis=1))) / 4)


def _plane(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return digits(points[:, ::2]), digits(points[:, 1::2])


def _disc(points: np.ndarray) -> np.ndarray:
    x, y = _plane(points)
    return ((x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.16).astype(float)


def _bell(centre: float, width: float) -> Function:
    return lambda points: np.exp(-(((digits(points) - centre) / width) ** 2) / 2)


def _lorentzian(width: float) -> Function:
    return lambda points: 1 / (1 + ((digits(points) - 0.3) / width) ** 2)


def _bells(points: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(3)
    return sum(_bell(rng.random(), 10 ** -rng.uniform(2, 5))(points) for _ in range(10))


def _weierstrass(points: np.ndarray) -> np.ndarray:
    x = digits(points)
    return sum(0.5**k * np.cos(3**k * math.pi * x) for k in range(20))


def _quantics(points: np.ndarray) -> np.ndarray:
    x, y = (10 * z - 5 for z in _plane(points))
    waves = np.sin(x * y) * np.exp(-(x**2)) + np.cos(3 * x * y) * np.exp(-(y**2)) + np.cos(x + y)
    return (
        1 + np.exp(-0.4 * (x**2 + y**2)) + waves + 0.05 * np.cos(200 * x - 400 * y) + 5e-4 * np.cos(1000 * (y - 2 * x))
    )


def _wave(points: np.ndarray) -> np.ndarray:
    x, y = _plane(points)
    return np.exp(40j * (x + 2 * y) - 30 * ((x - 0.4) ** 2 + (y - 0.6) ** 2))


def _ising_plane(n: int) -> Function:
    """Boltzmann weights of an open square lattice at the critical temperature."""

    def weights(points: np.ndarray) -> np.ndarray:
        s = (2 * points - 1).reshape(-1, n, n)
        bonds = (s[:, 1:] * s[:, :-1]).sum(axis=(1, 2)) + (s[:, :, 1:] * s[:, :, :-1]).sum(axis=(1, 2))
        return np.exp(math.log(1 + math.sqrt(2)) / 2 * (bonds - 2 * n * (n - 1)))

    return weights


def _ising_plane_train(n: int) -> tnlib.TensorTrain:
    """Return these weights as a train: a bond carries the last n spins, the last one in the lowest bit."""
    weight, state = 1 + math.sqrt(2), np.arange(2**n)
    cores = []
    for row, column in np.ndindex(n, n):
        core = np.zeros((2**n, 2, 2**n))
        for spin in range(2):
            unlike = (column > 0) * (state % 2 ^ spin) + (row > 0) * (state >> n - 1 ^ spin)
            core[state, spin, (2 * state + spin) % 2**n] = weight**-unlike
        cores.append(core)
    cores[0], cores[-1] = cores[0][:1], cores[-1].sum(axis=2, keepdims=True)
    return tnlib.TensorTrain(cores)


def _ising_chain(beta: float, field: float) -> Function:
    def weights(points: np.ndarray) -> np.ndarray:
        s = 2 * points - 1
        return np.exp(beta * (s[:, 1:] * s[:, :-1] - 1).sum(axis=1) + field * (s - 1).sum(axis=1))

    return weights


def _cold_spins(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return spins of the chain at beta 2 without a field: its bonds are independent."""
    walls = rng.random((count, 100)) < 1 / (1 + math.exp(8))
    walls[:, 0] = rng.integers(0, 2, count)
    return np.cumsum(walls, axis=1) % 2


def _spin_glass(points: np.ndarray) -> np.ndarray:
    s = 2 * points - 1
    couplings = np.triu(np.random.default_rng(5).standard_normal((16, 16)), 1) / 4
    return np.exp(np.einsum("mi,ij,mj->m", s, couplings, s))


def _vectors(points: np.ndarray) -> np.ndarray:
    table = np.random.default_rng(6).uniform(0.9, 1.1, (points.shape[1], 2))
    return np.prod(table[np.arange(points.shape[1]), points], axis=1)


def _rosenbrock(points: np.ndarray) -> np.ndarray:
    x = _centred(points, 50, 2)
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(axis=1)


def _ackley(points: np.ndarray) -> np.ndarray:
    x = _centred(points, 40, 32)
    mean, waves = np.sqrt(np.square(x).mean(axis=1)), np.cos(2 * math.pi * x).mean(axis=1)
    return 20 + math.e - 20 * np.exp(-0.2 * mean) - np.exp(waves)


def _rastrigin(points: np.ndarray) -> np.ndarray:
    x = _centred(points, 32, 5.12)
    return 10 * x.shape[1] + (x**2 - 10 * np.cos(2 * math.pi * x)).sum(axis=1)


def _griewank(points: np.ndarray) -> np.ndarray:
    x = _centred(points, 32, 100)
    return 1 + np.square(x).sum(axis=1) / 4000 - np.cos(x / np.sqrt(np.arange(1, x.shape[1] + 1))).prod(axis=1)


def _sum(points: np.ndarray) -> np.ndarray:
    return points.sum(axis=1).astype(float)


def _noise(points: np.ndarray) -> np.ndarray:
    mixed = (points * np.array([7919, 104729, 1299709, 15485863, 179424673])).sum(axis=1)
    return 1 / (1 + _sum(points)) + 1e-6 * np.sin(1e3 * mixed)


FUNCTIONS = (
    Hard("product peak, 64^6", lambda p: np.prod(1 / (1 + ((p - 31.5) / 1.3) ** 2), axis=1), (64,) * 6),
    Hard("correlated Gaussian, 50^5", _gaussian, (50,) * 5),
    Hard("step i + j + ... > 47, 20^5", lambda p: (_sum(p) > 47).astype(float), (20,) * 5),
    Hard("ball of radius 8, 20^4", lambda p: (np.square(p - 9.5).sum(axis=1) < 64).astype(float), (20,) * 4),
    Hard("x + y < 1, 2 x 15 bits", lambda p: (sum(_plane(p)) < 1).astype(float), (2,) * 30),
    Hard("disc, 2 x 8 bits", _disc, (2,) * 16, 1e-3),
    Hard("chirp cos(3000 x^2), 30 bits", lambda p: np.cos(3000 * digits(p) ** 2), (2,) * 30, 1e-8),
    Hard("cos(1e8 x), 40 bits", lambda p: np.cos(1e8 * digits(p)), (2,) * 40, 1e-8),
    Hard("Lorentzian of width 1e-6, 40 bits", _lorentzian(1e-6), (2,) * 40, peak=0.3),
    Hard("Lorentzian of width 1e-9, 40 bits", _lorentzian(1e-9), (2,) * 40, peak=0.3),
    Hard("Gaussian of width 1e-6, 40 bits", _bell(0.3, 1e-6), (2,) * 40, peak=0.3),
    Hard("1 + Gaussian of width 1e-4, 30 bits", lambda p: 1 + _bell(0.3, 1e-4)(p), (2,) * 30, peak=0.3),
    Hard("ten Gaussians, widths 1e-2 to 1e-5, 30 bits", _bells, (2,) * 30),
    Hard("Weierstrass, 20 bits", _weierstrass, (2,) * 20),
    Hard("step at 1/3, 40 bits", lambda p: (digits(p) > 1 / 3).astype(float), (2,) * 40, peak=1 / 3),
    Hard("square wave of 7 periods, 30 bits", lambda p: np.sign(np.sin(14 * math.pi * digits(p))), (2,) * 30),
    Hard("Fermi function, beta 1e4, 30 bits", lambda p: 1 - np.tanh(5e3 * (digits(p) - 0.3)), (2,) * 30, peak=0.3),
    Hard("log(x + 1e-9), 35 bits", lambda p: np.log(digits(p) + 1e-9), (2,) * 35, 1e-8),
    Hard("sqrt(|x - 1/pi|), 30 bits", lambda p: np.sqrt(np.abs(digits(p) - 1 / math.pi)), (2,) * 30, 1e-8),
    Hard("waves of many scales, 2 x 15 bits", _quantics, (2,) * 30),
    Hard("Ising 4 x 4, critical", _ising_plane(4), (2,) * 16),
    Hard("Ising 5 x 5, critical", _ising_plane(5), (2,) * 25),
    Hard("Ising 6 x 6, critical", _ising_plane(6), (2,) * 36, exact=lambda: _ising_plane_train(6)),
    Hard("Ising chain of 100, beta 2", _ising_chain(2, 0), (2,) * 100, draw=_cold_spins),
    Hard("Ising chain of 100, beta 0.4, field 0.1", _ising_chain(0.4, 0.1), (2,) * 100),
    Hard("spin glass of 16, all to all", _spin_glass, (2,) * 16),
    Hard("1/(1 + i + j + ...), 2^1000", lambda p: 1 / (1 + _sum(p)), (2,) * 1000),
    Hard("product of 1000 vectors", _vectors, (2,) * 1000),
    Hard("cos(i + j + ...), 4^500", lambda p: np.cos(_sum(p)), (4,) * 500),
    Hard("Rosenbrock, 50^10", _rosenbrock, (50,) * 10),
    Hard("Ackley, 40^7", _ackley, (40,) * 7, 1e-4),
    Hard("Rastrigin, 32^20", _rastrigin, (32,) * 20),
    Hard("Griewank, 32^6", _griewank, (32,) * 6),
    Hard("max(i, j, ...), 20^5", lambda p: p.max(axis=1).astype(float), (20,) * 5),
    Hard("|i + j + ... - 47|, 20^5", lambda p: np.abs(_sum(p) - 47), (20,) * 5),
    Hard("parity of 60 bits", lambda p: _sum(p) % 2, (2,) * 60),
    Hard("parity of 30 of 60 bits", lambda p: _sum(p[:, ::2]) % 2, (2,) * 60),
    Hard("plane wave times Gaussian, 2 x 12 bits", _wave, (2,) * 24, 1e-8),
    Hard("1/(1 + i + j + ...) and noise of 1e-6, 20^5", _noise, (20,) * 5, 1e-4),
    Hard("i = j = k, 30^3 x 5", lambda p: (p[:, :3] == p[:, :1]).all(axis=1).astype(float), (30, 30, 30, 5)),
    Hard("legs of size 1", lambda p: 1 / (1 + _sum(p)), (1, 20, 1, 20, 1)),
)


def _binary(x: np.ndarray, d: int) -> np.ndarray:
    return (x * 2**d).astype(np.int64)[:, None] >> np.arange(d - 1, -1, -1) & 1


def error(hard: Hard, value: tnlib.TensorTrain) -> float:
    """Return the relative error of `value`: of all entries, to an exact train, or from a sample.

    With a peak, half of the points lie at distances of it whose logarithms are uniform. The others are uniform unless
    they are drawn by the function. Squares are divided by the density of the points.
    """
    if hard.exact is not None:
        exact = hard.exact()
        return float((exact - value).norm() / exact.norm())
    d, rng = len(hard.shape), np.random.default_rng(99)
    if hard.draw is not None:
        points = hard.draw(rng, _POINTS)
    elif math.prod(hard.shape) <= _WHOLE:
        points = np.stack(np.unravel_index(np.arange(math.prod(hard.shape)), hard.shape), axis=1)
    else:
        points = np.stack([rng.integers(0, n, max(2048, _POINTS // max(1, d // 30))) for n in hard.shape], axis=1)
    weights = np.ones(len(points))
    if hard.peak is not None:
        logs = rng.uniform(-d * math.log(2), 0, len(points))
        x = hard.peak + np.exp(logs) * rng.choice([-1, 1], len(points))
        points = np.concatenate([points, _binary(x[(x >= 0) & (x < 1)], d)])
        distance = np.abs(digits(points) - hard.peak) + 0.5**d
        weights = 1 / (1 + 1 / (2 * distance * d * math.log(2)))  # of the density of the mixture
    want = hard.f(points)
    weights = np.abs(want) ** -2.0 if hard.draw is not None else weights
    missed = np.abs(tnlib.entries(value, points) - want)
    return math.sqrt(float((weights * missed**2).sum() / (weights * np.abs(want) ** 2).sum()))


def verdict(hard: Hard, seed: int) -> tuple[str, int, float, float]:
    """Return right, false, not converged or slow; evaluations; error; seconds of CPU time."""
    start = time.process_time()

    def stop(fit: tnlib.Fit) -> None:
        if time.process_time() - start > _LONGEST_SECONDS:
            raise StopIteration

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tnlib.ConvergenceWarning)
        fit = tnlib.tt_cross(hard.f, hard.shape, rtol=hard.rtol, rng=seed, callback=stop)
    seconds, missed = time.process_time() - start, error(hard, fit.value)
    outcome = "right" if missed <= _FALSE * hard.rtol else "false"
    if seconds > _LONGEST_SECONDS:
        outcome = "slow"
    elif not fit.converged:
        outcome = "not converged"
    return outcome, int(fit.n_calls or 0), missed, seconds


def main(seeds: int = 3, word: str = "") -> None:
    """Print the table."""
    outcomes = ("right", "false", "not converged", "slow")
    print("| function | rtol | evaluations | error | seconds | right | falsely converged | not converged | slow |")
    print("|---|---|---|---|---|---|---|---|---|")
    total: Counter[str] = Counter()
    medians = []
    for hard in FUNCTIONS:
        if word not in hard.name:
            continue
        results = [verdict(hard, seed) for seed in range(seeds)]
        counts = Counter(result[0] for result in results)
        total += counts
        calls, seconds = (statistics.median(result[k] for result in results) for k in (1, 3))
        medians.append(calls)
        cells = " | ".join(str(counts[outcome]) for outcome in outcomes)
        name = hard.name.replace("|", "\\|")
        worst = max(result[2] for result in results)
        print(f"| {name} | {hard.rtol:.0e} | {calls:,.0f} | {worst:.0e} | {seconds:.1f} | {cells} |", flush=True)
    cells = " | ".join(str(total[outcome]) for outcome in outcomes)
    print(f"| all; median | | {statistics.median(medians):,.0f} | | | {cells} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
