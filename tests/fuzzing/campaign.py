"""Fuzz a reader in a child process that is killed where a file takes longer than 10 seconds."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIME_LIMIT = 10.0  # seconds a file
_START_LIMIT = 300.0  # for imports and samples
BAD = ("raw", "hang", "crash", "memory", "outside")
TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Result:
    """Outcomes of one reader, and the first case of each kind of failure."""

    reader: str
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def n_files(self) -> int:
        return self.outcomes.total() - self.outcomes["outside"]

    @property
    def failures(self) -> list[str]:
        return [
            f"{self.reader} {case}: {kind}{f', {reason}' if reason else ''}"
            for (kind, reason), case in self.examples.items()
        ]

    def add(self, outcome: str, reason: str, case: int) -> None:
        self.outcomes[outcome] += 1
        if outcome in BAD:
            self.examples.setdefault((outcome, reason.split(": ")[0]), case)


def fuzz(reader: str, *, seconds: float | None = None, first: int = 0, count: int = 0) -> Result:
    """Fuzz for some seconds, or the cases first, ..., first + count - 1."""
    result, case = Result(reader), first
    end = None if seconds is None else time.monotonic() + seconds
    while (end is None or time.monotonic() < end) and (not count or case < first + count):
        case = _until_it_ends(result, case, first + count - case if count else 0, end)
    return result


def _until_it_ends(result: Result, first: int, count: int, end: float | None) -> int:
    """Run one child process to its end, its first hang or crash, or the end of the time; return the next case."""
    path = os.pathsep.join([str(TESTS), *(p for p in sys.path if p)])
    environment = os.environ | {"PYTHONPATH": path, "MALLOC_ARENA_MAX": "1", "HF_HUB_OFFLINE": "1"}
    environment |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "fuzzing.worker", result.reader, str(first), str(count)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as child,
    ):
        try:
            running, last = _listen(result, child, end)
            if running is not None and child.poll() is None:
                result.add("hang", "", running)
            elif running is not None:
                result.add("crash", f"exit code {child.returncode}", running)
            if last is None:
                errors.seek(0)
                raise RuntimeError(f"the samples of {result.reader} are not read:\n{errors.read().decode()}")
            return last + 1
        finally:
            child.kill()


def _listen(result: Result, child: subprocess.Popen[bytes], end: float | None) -> tuple[int | None, int | None]:
    """Count outcomes until the child ends, hangs, or the time is over; return the case that runs, and the last one."""
    assert child.stdout is not None
    running, last, limit, buffer = None, None, _START_LIMIT, b""
    while end is None or running is not None or last is None or time.monotonic() < end:
        if not select.select([child.stdout], [], [], limit)[0]:
            break
        data = os.read(child.stdout.fileno(), 1 << 16)
        if not data:
            child.wait()
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for said in map(json.loads, lines):
            limit = TIME_LIMIT
            running = _note(result, said, running)
            last = said.get("case", last)
    return running, last


def _note(result: Result, said: dict[str, Any], running: int | None) -> int | None:
    """Count an outcome; return the case that is running."""
    if "outcome" in said:
        result.add(said["outcome"], said["reason"], said["case"])
        return None if said["outcome"] != "outside" else said["case"]
    return said.get("case", running)


def table(results: list[Result]) -> str:
    """Return the outcomes as a table."""
    columns = ["refused", "read", "raw", "hang", "crash", "memory", "outside"]
    rows = [["reader", "files", *columns]]
    rows += [[r.reader, f"{r.n_files:,}", *(f"{r.outcomes[name]:,}" for name in columns)] for r in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
