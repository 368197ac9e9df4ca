"""How time grows: tt_svd with the number of entries, round with the number of cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tnlib
from benchmarks.cases import noisy_train, padded_train

RANK, RTOL = 16, 1e-3
LEG, BOND, TRUE_RANK, ROUND_RTOL = 16, 32, 16, 1e-6
ROUNDS = 5

ABOUT = {
    "tt_svd": f"tt_svd of 2 x 2 x ... float64, a train of rank {RANK} plus noise, rtol {RTOL:g}",
    "round": f"round of cores ({BOND}, {LEG}, {BOND}) whose true rank is {TRUE_RANK}, rtol {ROUND_RTOL:g}",
}


def measure(scale: str) -> dict[str, Any]:
    """Return {function: {"sizes": [...], "seconds": [...]}}, medians; a function that is not there is left out."""
    small = scale == "small"
    found = {"tt_svd": _sweep([2**e for e in (range(10, 19, 2) if small else range(18, 29, 2))], _tt_svd)}
    if hasattr(tnlib, "round"):
        found["round"] = _sweep([4, 10, 25] if small else [10, 20, 50, 100, 200, 500, 1000], _round)
    return found


def _sweep(sizes: list[int], prepare: Callable[[int], Callable[[], object]]) -> dict[str, list[Any]]:
    return {"sizes": sizes, "seconds": [_median(prepare(size)) for size in sizes]}


def _tt_svd(n_entries: int) -> Callable[[], object]:
    x = noisy_train((2,) * (n_entries.bit_length() - 1), RANK)
    return lambda: tnlib.tt_svd(x, rtol=RTOL)


def _round(n_cores: int) -> Callable[[], object]:
    train = tnlib.TensorTrain(padded_train((LEG,) * n_cores, TRUE_RANK, BOND))
    return lambda: tnlib.round(train, rtol=ROUND_RTOL)


def _median(work: Callable[[], object]) -> float:
    work()  # compiles and warms up
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Exponent of the power law that fits best: 1 is linear."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
