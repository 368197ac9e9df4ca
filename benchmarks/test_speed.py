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
# Who takes longer than so many seconds has so many turns: a slow moment matters less to it. A first turn that compiles
# or warms up weighs nothing in a median of seven.
SLOW_TURNS = ((10.0, 1), (2.0, 3), (0.0, 7))
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
    if turn > 0 and turn >= _turns(_seconds[key]):
        pytest.skip("it is slow and had its turns")

    x = _data(case)
    benchmark.extra_info.update(case=case.name, entry=entry.name)
    prepared = entry.prepare(x, case)
    gc.collect()
    time.sleep(REST[pytestconfig.getoption("scale")])
    result = benchmark.pedantic(entry.call, args=(prepared, case))
    _seconds[key] = benchmark.stats.stats.max
    if turn == 0:
        benchmark.extra_info.update(_check(entry, result, x, case))


def _turns(seconds: float) -> int:
    return next(turns for least, turns in SLOW_TURNS if seconds > least)


def _check(entry: Entry, result: Any, x: Any, case: Case) -> dict[str, Any]:
    """Look at what came out, off the clock."""
    arrays = entry.as_arrays(result)
    error = truth.error(case.layout, x, arrays)
    return {
        "error": error,
        "solved": error <= case.limit,
        "ranks": truth.ranks(case.layout, arrays),
        "stored": truth.stored(arrays),
    }
