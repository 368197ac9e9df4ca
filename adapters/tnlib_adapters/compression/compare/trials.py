"""Trials of candidate methods at several sizes: rows for CSV and terminal, and refusals with reasons."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tnlib import ArgumentError
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.factorisation import Factorisation, Plan
from tnlib_adapters.compression.request import Progress, check_runs

Row = TypeVar("Row")
Table = tuple[str, list[str], list[list[list[str]]]]  # title, columns, groups of rows of cells


@dataclass(frozen=True)
class Trial:
    """A row name, size, factorisation and plan, with the seconds of both."""

    name: str
    size: float  # fraction of the numbers, or bits
    factorisation: Factorisation
    plan: Plan
    factorising: float
    planning: float


@dataclass(frozen=True)
class Candidate:
    """A row name, the method the model must support, the function that factorises, and the sizes."""

    name: str
    method: str
    factorise: Callable[[Progress], Factorisation]
    sizes: Sequence[float]


def run_trials(
    checkpoint: Checkpoint,
    candidates: Iterable[Candidate],
    measure: Callable[[Trial], Sequence[Row]],
    progress: Progress,
) -> tuple[list[Row], dict[str, str]]:
    """Factorise by every candidate, measure at every size, and return the rows and reasons for missing ones."""
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
        for size in candidate.sizes:
            started = time.perf_counter()
            try:
                plan = factorisation.plan(size, named_progress)
            except ArgumentError as problem:
                refused[f"{candidate.name} at {size:g}"] = _reason(problem)
                continue
            rows += measure(
                Trial(candidate.name, size, factorisation, plan, factorising, time.perf_counter() - started)
            )
            del plan  # and its files
        del factorisation
    return rows, refused


def _named(progress: Progress, name: str) -> Progress:
    return lambda stage, done, total: progress(f"{name}: {stage}", done, total)


def _reason(problem: ArgumentError) -> str:
    return str(problem).partition(": ")[2]  # drop the function name


def write_rows(file: Path, kind: type, rows: Sequence[Any]) -> None:
    """Write one line per row, with a header of field names."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow([field.name for field in fields(kind)])
        writer.writerows(astuple(row) for row in rows)


def grouped(
    rows: Sequence[Row], group: Callable[[Row], Hashable], cells: Callable[[Row], list[str]]
) -> list[list[list[str]]]:
    """Return the cells of all rows by group, groups in order of first appearance."""
    groups: dict[Hashable, list[list[str]]] = {}
    for row in rows:
        groups.setdefault(group(row), []).append(cells(row))
    return list(groups.values())
