"""Time of `compress` in this process and with two workers, for a made-up Llama in bf16, each in a process of its own.

python -m benchmarks.cluster [--scale full|small] [--workers 2]     print a table of the seconds by stage
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.large_models import SHORT_TEXT, Llama, calibration_text, make

CHILD = "import sys; from benchmarks import cluster; cluster.compressed(*sys.argv[1:])"
MODELS = {"full": Llama(4, 512, 8, 2, 1408, 2048), "small": Llama(4, 64, 8, 2, 176, 1024)}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOTAL = "all"

Seconds = dict[str, dict[str, float]]  # by the number of workers, and the stage


def measure(scale: str, workers: int = 2) -> Seconds:
    """Return the seconds of every stage, and of all, without workers and with so many."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "model"
        make(MODELS[scale], source)
        text = calibration_text(source, SHORT_TEXT)
        return {str(n): _in_child(source, text, source.with_name(f"out-{n}"), n) for n in (0, workers)}


def _in_child(source: Path, text: Path, out: Path, n_workers: int) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, *map(str, (source, text, out, n_workers))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def compressed(source: str, text: str, out: str, n_workers: str) -> None:
    """Compress, and print the seconds of every stage; the process does nothing else."""
    import tnlib_adapters
    from tnlib_adapters.compression.calibration import factorise_and_fit
    from tnlib_adapters.compression.executor import open_executor

    factorise_and_fit.ROUNDED_STEPS = 1
    stages, started = Stages(), time.perf_counter()
    with open_executor(workers=int(n_workers) or None) as executor:
        tnlib_adapters.compress(
            source,
            out,
            tnlib_adapters.Budget(bits=3),
            calibration=text,
            run=tnlib_adapters.Run(executor=executor, progress=stages),
        )
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
    """Yield the lines of a table: a row for every stage."""
    from benchmarks.report import table

    yield from (f"## Workers, {MODELS[scale].n_layers} layers of {MODELS[scale].d_model}", "", ABOUT, "")
    alone, shared = seconds.values()
    names = [f"{n} workers (s)" for n in seconds]
    rows = (
        (stage, f"{own:.2f}", f"{shared.get(stage, 0.0):.2f}", f"{own / max(1e-9, shared.get(stage, 0.0)):.2f}x")
        for stage, own in alone.items()
    )
    yield from table(("stage", *names, "ratio"), rows)


ABOUT = """\
`compress --what all --bits 3 --calibrate TEXT --workers N` of a random Llama in bf16, one BLAS thread in every process.
Workers decompose and round the weights, which is part of "collecting statistics" and of the stage after it; the other
stages run in the calling process. The fit, which is not distributed, takes one step a layer here."""


@click.command()
@click.option("--scale", type=click.Choice(("full", "small")), default="full")
@click.option("--workers", type=int, default=2, help="Number of workers.")
def main(scale: str, workers: int) -> None:
    seconds = measure(scale, workers)
    print(json.dumps(seconds), file=sys.stderr)
    print("\n".join(section(scale, seconds)))


if __name__ == "__main__":
    main()
