"""Estimated and measured cost of `compress` on made-up Llamas: seconds and peak memory, each in a process of its own.

python -m benchmarks.costs [--case NAME ...] [--text FILE]     print a Markdown table
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tnlib_adapters.data import builtin_path

from benchmarks.large_models import Llama, make
from benchmarks.texts import sentences

CHILD = "import sys; from benchmarks.costs import child; child(*sys.argv[1:])"
STEPS = 10  # of the fit of a block, in the estimate and in the measured run
SENTENCES = 200
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Case:
    """A compression of a made-up model; with a text if `by_text`."""

    name: str
    model: Llama
    arguments: dict[str, Any]
    by_text: bool


def cases() -> list[Case]:
    """Return plain and calibrated compressions of several sizes."""
    small, deep = Llama(4, 512, 8, 2, 1408, 1024), Llama(8, 512, 8, 2, 1408, 1024)
    wide, words = Llama(4, 1024, 16, 4, 2816, 1024), Llama(4, 512, 8, 2, 1408, 32_000)
    plain, fraction = {"method": "matrix", "what": "all", "keep": 0.5}, {"what": "all", "keep": 0.5}
    return [
        Case("512 x 4, matrix", small, plain, False),
        Case("512 x 8, matrix", deep, plain, False),
        Case("1024 x 4, matrix", wide, plain, False),
        Case("512 x 4, matrix with a text", small, plain, True),
        Case("512 x 4, calibrated", small, fraction, True),
        Case("512 x 8, calibrated", deep, fraction, True),
        Case("1024 x 4, calibrated", wide, fraction, True),
        Case("512 x 4, 32,000 words, calibrated", words, fraction, True),
        Case("512 x 4, attention, quantized", small, {"bits": 4}, True),
    ]


def row_of(case: Case, text: Path | None) -> dict[str, Any]:
    """Make the model, and return the estimate and the measurement."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "model"
        make(case.model, source)
        for name in TOKENIZER:
            shutil.copy(builtin_path("llama") / name, source)
        file = text or Path(scratch) / "text.txt"
        if text is None:
            file.write_text("\n".join(sentences("docstrings", SENTENCES)), encoding="utf-8")
        arguments = case.arguments | ({"calibrate": str(file)} if case.by_text else {})
        estimated, measured = (_run(what, source, Path(scratch) / "out", arguments) for what in ("estimate", "run"))
        return {"case": case.name, "estimated": estimated, "measured": measured}


def _run(what: str, source: Path, out: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD, what, str(source), str(out), json.dumps(arguments)]
    printed: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return printed


def child(what: str, source: str, out: str, arguments: str) -> None:
    """Estimate or compress with few steps of the fit, and print seconds and peak memory."""
    import tnlib_adapters
    from tnlib_adapters.files.process_memory import peak_memory

    started, options = time.perf_counter(), json.loads(arguments)
    if "calibrate" in options:
        from tnlib_adapters.compression.calibration import fit_by_block

        fit_by_block.STEPS = fit_by_block.ROUNDED_STEPS = STEPS
    if what == "estimate":
        cost = tnlib_adapters.estimate_cost(source, **options)
        print(json.dumps({"seconds": cost.total_seconds, "peak": cost.peak_memory, "stages": dict(cost.seconds)}))
        return
    tnlib_adapters.compress(source, out, **options)
    print(json.dumps({"seconds": time.perf_counter() - started, "cpu": time.process_time(), "peak": peak_memory()}))


def table(rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| compression | seconds estimated | measured | processor | peak memory estimated | measured |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        first, then = row["estimated"], row["measured"]
        seconds = f"{first['seconds']:.0f} | {then['seconds']:.0f} | {then['cpu']:.0f}"
        yield f"| {row['case']} | {seconds} | {first['peak'] / 1e6:,.0f} MB | {then['peak'] / 1e6:,.0f} MB |"


@click.command()
@click.option("--case", "names", multiple=True, help="Name of a case; all by default.")
@click.option("--text", type=click.Path(path_type=Path), help="Calibration text; docstrings of Python by default.")
def main(names: tuple[str, ...], text: Path | None) -> None:
    for line in table(row_of(case, text) for case in cases() if not names or case.name in names):
        print(line, flush=True)


if __name__ == "__main__":
    main()
