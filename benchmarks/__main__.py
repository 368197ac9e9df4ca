"""Measure, and write the page.

    python -m benchmarks [--scale full|small] [--part speed --part growth ...] [--page-only]
    python -m benchmarks --case tt24

At full scale the page is docs/benchmarks.md, at small scale out/benchmarks.md. What was measured lies in
out/bench.json or out/bench-small.json; a part that is measured again replaces its own section there. With --case the
table of one case is printed, and nothing is written.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from benchmarks import (
    accuracy,
    cluster,
    dask_workers,
    growth,
    large_models,
    machine,
    memory,
    report,
    speed,
)
from benchmarks.cases import SCALES
from benchmarks.peers import REGISTRY
from benchmarks.results import Results

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "machine": machine.measure,
    "startup": speed.measure_startup,
    "speed": speed.measure,
    "memory": memory.measure,
    "past memory": memory.measure_past,
    "dask": dask_workers.measure,
    "growth": growth.measure,
    "accuracy": accuracy.measure,
    "large": large_models.measure,
    "workers": cluster.measure,
}


@click.command()
@click.option("--scale", type=click.Choice(SCALES), default="full")
@click.option("--part", "parts", type=click.Choice(list(PARTS)), multiple=True, default=tuple(PARTS))
@click.option("--page-only", is_flag=True, help="Measure nothing; write the page again.")
@click.option("--case", type=click.Choice(tuple(REGISTRY)), help="Time one case and print its table; write nothing.")
def main(scale: str, parts: tuple[str, ...], page_only: bool, case: str | None) -> None:
    if case is not None:
        print("\n".join(report.case_table(Results({"scale": scale, "speed": speed.measure(scale, case)}), case)))
        return
    small = scale == "small"
    store = ROOT / "out" / ("bench-small.json" if small else "bench.json")
    page = ROOT / ("out" if small else "docs") / "benchmarks.md"
    data = json.loads(store.read_text()) if store.exists() else {}
    data |= {"scale": scale, "command": "make bench SCALE=small" if small else "make bench"}
    for part in () if page_only else parts:
        start = time.perf_counter()
        data[part] = PARTS[part](scale)
        store.parent.mkdir(exist_ok=True)
        store.write_text(json.dumps(data, indent=1))
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    report.write(data, page)
    print(f"Page: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
