"""One entry of 2^20 that is not zero: how often TT-cross finds it, and how many evaluations that takes.

    python -m benchmarks.one_entry

prints the median number of evaluations, and how often the entry was found, or a zero train was returned as converged.
The entry is at another random place in each of 20 runs. Peers do not say whether they have converged: a train without
the entry counts as falsely converged.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tnlib
from benchmarks.crosses import entries, teneva_cross, torch_cross
from benchmarks.entry import resolve

_SHAPE, _RUNS = (2,) * 20, 20
_BUDGETS = (1_000, 10_000, 100_000, 300_000, 1_000_000, 1 << 20)
Solve = Callable[[Any, np.ndarray, int], tuple[float, bool]]  # function, place, seed -> value there, converged


def _tnlib(budget: int) -> Solve:
    def solve(f: Any, place: np.ndarray, seed: int) -> tuple[float, bool]:
        fit = tnlib.tt_cross(f, _SHAPE, rtol=1e-6, max_calls=budget, rng=seed)
        return float(fit.value[tuple(place)]), fit.converged

    return solve


def _peer(name: str, cross: Any) -> Solve:
    def solve(f: Any, place: np.ndarray, seed: int) -> tuple[float, bool]:
        try:
            result = cross(resolve(name), f, _SHAPE, 1e-6)
        except (ValueError, ArithmeticError, RuntimeError, np.linalg.LinAlgError):
            return 0.0, False
        cores = [np.asarray(core) for core in getattr(result, "cores", result)]
        return float(entries(cores, place[None])[0]), True

    return solve


def rows() -> Iterator[str]:
    """Yield one row for every budget of tnlib, and one for every peer."""
    solvers = {f"tnlib, `max_calls={budget:_}`": _tnlib(budget) for budget in _BUDGETS}
    solvers |= {"teneva `cross`": _peer("teneva:cross", teneva_cross)}
    solvers |= {"torchTT `dmrg_cross`": _peer("torchtt.interpolate:dmrg_cross", torch_cross)}
    for name, solve in solvers.items():
        calls: list[int] = []
        found, false = 0, 0
        for seed in range(_RUNS):
            place = np.random.default_rng(seed).integers(0, 2, len(_SHAPE))
            calls.append(0)

            def f(points: np.ndarray, place: np.ndarray = place, calls: list[int] = calls) -> np.ndarray:
                calls[-1] += len(points)
                return (points == place).all(axis=1).astype(float)

            value, converged = solve(f, place, seed)
            is_found = abs(value - 1) < 1e-3
            found, false = found + is_found, false + (converged and not is_found)
        yield f"| {name} | {statistics.median(calls):,.0f} | {found} | {false} | {_RUNS - found - false} |"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    print("| library | evaluations | found | falsely converged | not converged, or an error |")
    print("|---|---|---|---|---|")
    for row in rows():
        print(row, flush=True)


if __name__ == "__main__":
    main()
