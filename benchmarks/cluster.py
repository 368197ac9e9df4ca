"""Time of `compress` on one and on two workers, for a made-up Llama in bf16, each in a process of its own.

python -m benchmarks.cluster [--scale full|small] [--workers 1 --workers 2]     print a table of the seconds by stage
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.large_models import CALIBRATED, SHORT_TEXT, TEXT, Llama, calibration_text, make

CHILD = "import sys; from benchmarks import cluster; cluster.compressed(*sys.argv[1:])"
MODELS = {"full": Llama(4, 512, 8, 2, 1408, 2048), "small": Llama(4, 64, 8, 2, 176, 1024)}
TOKENS = {"full": (TEXT, 2 * TEXT), "small": (SHORT_TEXT,)}  # batches of two texts, and of four
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOTAL = "all"


Seconds = dict[str, dict[str, dict[str, float]]]  # by the tokens of the text, the number of workers, and the stage


def measure(scale: str, workers: tuple[int, ...] = (1, 2)) -> Seconds:
    """Return the seconds of every stage, and of all."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "model"
        make(MODELS[scale], source)
        return {f"{n:,}": _of_text(source, n, workers) for n in TOKENS[scale]}


def _of_text(source: Path, n_tokens: int, workers: tuple[int, ...]) -> dict[str, dict[str, float]]:
    text = calibration_text(source, n_tokens)
    return {str(n): _in_child(source, text, source.with_name(f"out-{n_tokens}-{n}"), n) for n in workers}


def _in_child(source: Path, text: Path, out: Path, n_workers: int) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, *map(str, (source, text, out, n_workers))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def compressed(source: str, text: str, out: str, n_workers: str) -> None:
    """Compress, and print the seconds of every stage; the process does nothing else."""
    import tnlib_adapters

    stages, started = Stages(), time.perf_counter()
    options: dict[str, Any] = CALIBRATED | {"calibrate": text, "workers": int(n_workers), "progress": stages}
    tnlib_adapters.compress(source, out, **options)
    print(json.dumps(stages.seconds | {TOTAL: time.perf_counter() - started}))


class Stages:
    """Seconds between the calls of a progress function, counted to the stage of the later one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, stage: str, _done: int, _total: int) -> None:
        now = time.perf_counter()
        self.seconds[str(stage)] = self.seconds.get(str(stage), 0.0) + now - self._last
        self._last = now


def section(scale: str, seconds: Seconds) -> Iterator[str]:
    """Yield the lines of a table for every text: a row for every stage."""
    from benchmarks.report import table

    yield from (f"## Workers, {MODELS[scale].n_layers} layers of {MODELS[scale].d_model}", "", ABOUT, "")
    for n_tokens, of_workers in seconds.items():
        names = (f"{n} worker{'s' if n != '1' else ''} (s)" for n in of_workers)
        yield from table((f"stage, {n_tokens} tokens", *names, "ratio"), _rows(list(of_workers.values())))


def _rows(by_workers: Sequence[dict[str, float]]) -> Iterator[tuple[str, ...]]:
    for stage, first in by_workers[0].items():
        seconds = [own.get(stage, 0.0) for own in by_workers]
        yield (stage, *(f"{own:.2f}" for own in seconds), f"{first / max(1e-9, seconds[-1]):.2f}x")


ABOUT = """\
`compress --what all --keep 0.5 --calibrate TEXT --workers N` of a random Llama in bf16, one BLAS thread in every
process. A stage includes the time between the end of the previous stage and its first step: "running the model"
includes the start of the workers, "writing tensors" their end. Batches of the longer text hold four windows, those of
the shorter text two."""


@click.command()
@click.option("--scale", type=click.Choice(("full", "small")), default="full")
@click.option(
    "--workers", type=int, multiple=True, default=(1, 2), help="Number of workers; may be given several times."
)
def main(scale: str, workers: tuple[int, ...]) -> None:
    seconds = measure(scale, workers)
    print(json.dumps(seconds), file=sys.stderr)
    print("\n".join(section(scale, seconds)))


if __name__ == "__main__":
    main()
