"""Methods tried at several fractions: what a model cannot run, or a fraction rules out, is left out with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tnlib import ArgumentError
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.factorisation import Factorisation
from tnlib_adapters.compression.plan import Plan
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.compression.request import check_runs

Row = TypeVar("Row")


@dataclass(frozen=True)
class Tried:
    """A method by the name of its row at one fraction: what it was factorised into, and the plan; both with seconds."""

    name: str
    keep: float
    found: Factorisation
    plan: Plan
    factorising: float
    planning: float


@dataclass(frozen=True)
class Candidate:
    """The name of a row, the method that the model must be able to run for it, and what factorises by it."""

    name: str
    method: str
    factorise: Callable[[Progress], Factorisation]


def try_all(
    checkpoint: Checkpoint,
    candidates: Iterable[Candidate],
    keeps: Sequence[float],
    measure: Callable[[Tried], Sequence[Row]],
    progress: Progress,
) -> tuple[list[Row], dict[str, str]]:
    """Factorise by every candidate and measure it at every fraction; return the rows, and why others are missing."""
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for one in candidates:
        shown = _named(progress, one.name)
        try:
            check_runs("compare", checkpoint, one.method)
        except ArgumentError as problem:
            refused[one.name] = _reason(problem)
            continue
        started = time.perf_counter()
        found = one.factorise(shown)
        factorising = time.perf_counter() - started
        for keep in keeps:
            started = time.perf_counter()
            try:
                plan = found.plan(keep, shown)
            except ArgumentError as problem:
                refused[f"{one.name} at {keep:g}"] = _reason(problem)
                continue
            rows += measure(Tried(one.name, keep, found, plan, factorising, time.perf_counter() - started))
    return rows, refused


def _named(progress: Progress, name: str) -> Progress:
    return lambda stage, done, total: progress(f"{name}: {stage}", done, total)


def _reason(problem: ArgumentError) -> str:
    return str(problem).partition(": ")[2]  # without the name of a function
