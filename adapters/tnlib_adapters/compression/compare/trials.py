"""Run candidate methods at several fractions and record refusals with their reasons."""

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
    """A row name, fraction, factorisation and plan, with the seconds of both."""

    name: str
    keep: float
    found: Factorisation
    plan: Plan
    factorising: float
    planning: float


@dataclass(frozen=True)
class Candidate:
    """A row name, the method the model must support, and the function that factorises."""

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
    """Factorise by every candidate, measure at every fraction, and return the rows and reasons for missing ones."""
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for candidate in candidates:
        named_progress = _named(progress, candidate.name)
        try:
            check_runs("compare", checkpoint, candidate.method)
        except ArgumentError as problem:
            refused[candidate.name] = _reason(problem)
            continue
        started = time.perf_counter()
        factorisation = candidate.factorise(named_progress)
        factorising = time.perf_counter() - started
        for keep in keeps:
            started = time.perf_counter()
            try:
                plan = factorisation.plan(keep, named_progress)
            except ArgumentError as problem:
                refused[f"{candidate.name} at {keep:g}"] = _reason(problem)
                continue
            rows += measure(
                Tried(candidate.name, keep, factorisation, plan, factorising, time.perf_counter() - started)
            )
    return rows, refused


def _named(progress: Progress, name: str) -> Progress:
    return lambda stage, done, total: progress(f"{name}: {stage}", done, total)


def _reason(problem: ArgumentError) -> str:
    return str(problem).partition(": ")[2]  # drop the function name
