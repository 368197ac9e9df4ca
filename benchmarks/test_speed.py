"""The registry, timed by pytest-benchmark: every entry of a case takes its turn, then all of them again.

pytest-benchmark times all rounds of one function in a row. A machine that slows down for half a minute would then
slow one library and not the next. So each test here is one round of one entry, and the order of the tests is
case, turn, entry; speed.py puts the rounds of an entry together again.
"""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import pytest

from benchmarks import truth
from benchmarks.cases import Case, cases
from benchmarks.entry import Entry
from benchmarks.peers import REGISTRY

TURNS = {"full": 7, "small": 3}
SLOW = 2.0  # seconds; who takes longer has three turns, in which a slow moment matters less
SLOW_TURNS = 3
REST = {
    "full": 0.2,
    "small": 0.0,
}  # seconds; the threads of some libraries spin on for a while after their work is done

_seconds: dict[tuple[str, str], float] = {}  # of an entry's latest turn


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    scale = metafunc.config.getoption("scale")
    found = cases(scale)
    rounds = [
        pytest.param(found[name], entry, turn, id=f"{name}-{turn}-{entry.name}")
        for name, entries in REGISTRY.items()
        for turn in range(TURNS[scale])
        for entry in entries
    ]
    metafunc.parametrize(("case", "entry", "turn"), rounds)


@functools.lru_cache(maxsize=1)
def _data(case: Case) -> Any:
    return case.make(case)


def test_speed(case: Case, entry: Entry, turn: int, benchmark: Any, pytestconfig: pytest.Config) -> None:
    why = entry.missing()
    if why is not None:
        pytest.skip(why)
    key = case.name, entry.name
    if turn > 0 and key not in _seconds:
        pytest.skip("it failed before")
    if turn >= SLOW_TURNS and _seconds[key] > SLOW:
        pytest.skip("it is slow and had its turns")

    x = _data(case)
    benchmark.extra_info.update(case=case.name, entry=entry.name)
    if turn == 0:
        benchmark.extra_info.update(_check(entry, x, case))
    prepared = entry.prepare(x, case)
    gc.collect()
    time.sleep(REST[pytestconfig.getoption("scale")])
    benchmark.pedantic(entry.call, args=(prepared, case))
    _seconds[key] = benchmark.stats.stats.max


def _check(entry: Entry, x: Any, case: Case) -> dict[str, Any]:
    """Run once untimed, which compiles and warms up, and look at what comes out."""
    arrays = entry.solve(x, case)
    error = truth.error(case.layout, x, arrays)
    return {
        "error": error,
        "solved": error <= case.limit,
        "ranks": truth.ranks(case.layout, arrays),
        "stored": truth.stored(arrays),
    }
