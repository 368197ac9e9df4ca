"""What was measured, asked for by name; None where it was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cases import WITHIN, cases
from benchmarks.growth import slope
from benchmarks.machine import Bound, Rates, bound

OURS = "tnlib"


@dataclass(frozen=True)
class Results:
    """The content of out/bench.json, which `python -m benchmarks` writes part by part."""

    data: dict[str, Any]

    @property
    def timed(self) -> dict[str, dict[str, Any]]:
        """case -> entry -> seconds, error, solved, exact, ranks, stored."""
        return self.data.get("speed", {}).get("cases", {})

    def seconds(self, case: str, entry: str = OURS) -> float | None:
        found = self.timed.get(case, {}).get(entry)
        return float(np.median(found["seconds"])) if found else None

    def error(self, case: str, entry: str = OURS) -> float | None:
        found = self.timed.get(case, {}).get(entry)
        return found["error"] if found else None

    def fastest(self, case: str, *, exact: bool = False, among: str = "") -> str | None:
        """The fastest peer that solved the case: of those with an exact spectrum, or whose name starts so."""
        found = [
            name
            for name, one in self.timed.get(case, {}).items()
            if name != OURS and one["solved"] and one["exact"] >= exact and name.startswith(among)
        ]
        return min(found, key=lambda name: self.seconds(case, name) or 0.0, default=None)

    def ratio(self, case: str, entry: str | None) -> float | None:
        """How many times longer an entry takes than tnlib, medians of the same run."""
        ours, theirs = self.seconds(case), entry and self.seconds(case, entry)
        return theirs / ours if ours and theirs else None

    def bound(self, case: str) -> Bound | None:
        rates = self.data.get("machine", {}).get("rates")
        return bound(cases(self.data["scale"])[case], Rates(**rates)) if rates else None

    def over_bound(self, case: str) -> float | None:
        ours, least = self.seconds(case), self.bound(case)
        return ours / least.seconds if ours and least else None

    def error_over_best(self, case: str) -> float | None:
        """tnlib's error over the best that is possible, or known from theory."""
        ours = self.error(case)
        return None if ours is None else ours / (cases(self.data["scale"])[case].limit / WITHIN)

    def error_over_peers(self, case: str) -> float | None:
        """tnlib's error over the smallest one of all peers."""
        ours, theirs = (
            self.error(case),
            [one["error"] for name, one in self.timed.get(case, {}).items() if name != OURS],
        )
        return ours / min(theirs) if ours and theirs else None

    def memory(self, function: str) -> float | None:
        """Largest fraction of the input that was resident on top of it."""
        found = [one["extra"] / one["input"] for one in self.data.get("memory", []) if one["function"] == function]
        return max(found, default=None)

    def slope(self, function: str) -> float | None:
        found = self.data.get("growth", {}).get(function)
        return slope(found["sizes"], found["seconds"]) if found else None

    def startup(self, program: str, less: str = "") -> float | None:
        found = self.data.get("startup")
        return found[program] - (found[less] if less else 0.0) if found else None


@dataclass(frozen=True)
class Target:
    """One number that was asked for; `at_least` says from which side, `against` names whom it turned out to be."""

    subject: str
    words: str
    asked: float
    measured: Callable[[Results], float | None]
    at_least: bool = True
    against: Callable[[Results], str | None] = lambda _: None

    def met(self, results: Results) -> bool | None:
        value = self.measured(results)
        return None if value is None else (value >= self.asked if self.at_least else value <= self.asked)


def _faster(case: str, words: str, asked: float, pick: Callable[[Results], str | None]) -> Target:
    return Target(case, f"times faster than {words}", asked, lambda r: r.ratio(case, pick(r)), against=pick)


def _fastest(case: str, asked: float) -> Target:
    return _faster(case, "the fastest peer", asked, lambda r: r.fastest(case))


def _exact(case: str, asked: float) -> Target:
    return _faster(case, "the fastest SVD-accurate peer", asked, lambda r: r.fastest(case, exact=True))


def _library(case: str, library: str, asked: float) -> Target:
    return _faster(case, f"the fastest way with {library}", asked, lambda r: r.fastest(case, among=library))


def _entry(case: str, entry: str, asked: float) -> Target:
    return Target(case, f"times faster than {entry}", asked, lambda r: r.ratio(case, entry))


def _at_most(subject: str, words: str, asked: float, measured: Callable[[Results], float | None]) -> Target:
    return Target(subject, words, asked, measured, at_least=False)


FIRST = "first small tt_svd (20^4)"  # a program of startup.py

TARGETS = (
    _fastest("tt24", 45),
    _exact("tt24", 120),
    _at_most("tt24", "times the bound", 3, lambda r: r.over_bound("tt24")),
    _fastest("tt32", 15),
    _exact("tt32", 60),
    _fastest("tt20", 15),
    _exact("tt20", 30),
    _library("tucker4", "pyttb", 15),
    _entry("tucker4", "tensorly", 100),
    _library("tucker3", "pyttb", 5),
    _entry("tucker3", "tensorly", 60),
    _entry("cp3", "pyttb", 10),
    _entry("cp3", "tensorly", 10),
    _at_most("cp3", "times the best error of any peer", 1.001, lambda r: r.error_over_peers("cp3")),
    _at_most("svd", "times the optimal error", 1.001, lambda r: r.error_over_best("svd")),
    _entry("svd", "scipy", 6),
    _entry("svd", "torch lowrank", 1),
    _entry("round", "torchTT", 5),
    _at_most("memory of tt_svd", "of the input, beside the input and the result", 0.6, lambda r: r.memory("tt_svd")),
    _at_most("memory of tucker", "of the input, beside the input and the result", 0.6, lambda r: r.memory("tucker")),
    _at_most("growth of tt_svd", "is the exponent of the number of entries", 1.05, lambda r: r.slope("tt_svd")),
    _at_most("growth of round", "is the exponent of the number of cores", 1.05, lambda r: r.slope("round")),
    _at_most("import", "s on top of numpy's", 0.1, lambda r: r.startup("import numpy, tnlib", "import numpy")),
    _at_most("first small tt_svd", "s from the start of the process", 1.5, lambda r: r.startup(FIRST)),
)
