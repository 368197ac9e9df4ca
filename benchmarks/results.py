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
            if not name.startswith(OURS) and one["solved"] and one["exact"] >= exact and name.startswith(among)
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
            [one["error"] for name, one in self.timed.get(case, {}).items() if not name.startswith(OURS)],
        )
        return ours / min(theirs) if ours and theirs else None

    def memory(self, function: str) -> float | None:
        """Largest fraction of the input that was resident on top of it."""
        found = [one["extra"] / one["input"] for one in self.data.get("memory", []) if one["function"] == function]
        return max(found, default=None)

    def slope(self, function: str) -> float | None:
        found = self.data.get("growth", {}).get(function)
        return slope(found["sizes"], found["seconds"]) if found else None

    def startup(self, program: str) -> float | None:
        found = self.data.get("startup")
        return found[program] if found else None


@dataclass(frozen=True)
class Comparison:
    """One number of the summary; `against` returns the name of the peer it turned out to compare with."""

    subject: str
    words: str
    measured: Callable[[Results], float | None]
    against: Callable[[Results], str | None] = lambda _: None


def _faster(case: str, words: str, pick: Callable[[Results], str | None]) -> Comparison:
    return Comparison(case, f"speed-up over {words}", lambda r: r.ratio(case, pick(r)), pick)


def _fastest(case: str) -> Comparison:
    return _faster(case, "the fastest peer", lambda r: r.fastest(case))


def _exact(case: str) -> Comparison:
    return _faster(case, "the fastest peer that uses an SVD of the data", lambda r: r.fastest(case, exact=True))


def _library(case: str, library: str) -> Comparison:
    return _faster(case, f"the fastest {library} function", lambda r: r.fastest(case, among=library))


def _entry(case: str, entry: str) -> Comparison:
    return Comparison(case, f"speed-up over {entry}", lambda r: r.ratio(case, entry))


FIRST = "first small tt_svd (20^4)"  # a program of startup.py
_EXTRA = "peak memory beside input and result, relative to the input"

COMPARISONS = (
    _fastest("tt24"),
    _exact("tt24"),
    Comparison("tt24", "time relative to the bound", lambda r: r.over_bound("tt24")),
    _fastest("tt32"),
    _exact("tt32"),
    _fastest("tt20"),
    _exact("tt20"),
    _library("tucker4", "pyttb"),
    _entry("tucker4", "tensorly"),
    _library("tucker3", "pyttb"),
    _entry("tucker3", "tensorly"),
    _entry("cp3", "pyttb"),
    _entry("cp3", "tensorly"),
    Comparison("cp3", "error relative to the best error of a peer", lambda r: r.error_over_peers("cp3")),
    Comparison("svd", "error relative to the optimum", lambda r: r.error_over_best("svd")),
    _entry("svd", "scipy"),
    _entry("svd", "torch lowrank"),
    _entry("round", "torchTT"),
    Comparison("tt_svd", _EXTRA, lambda r: r.memory("tt_svd")),
    Comparison("tucker", _EXTRA, lambda r: r.memory("tucker")),
    Comparison("tt_svd", "exponent of the time in the number of entries", lambda r: r.slope("tt_svd")),
    Comparison("round", "exponent of the time in the number of cores", lambda r: r.slope("round")),
    Comparison("first small tt_svd", "seconds from the start of the process", lambda r: r.startup(FIRST)),
)
