"""What the statistics of a calibration cost beside plain forward passes, on MiniLM and the built-in Llama.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.moments [--model minilm] [--rounds 4]

One thread, docstrings of Python. Seconds are the process's own; every batch is run plainly and by each collection, one
right after the other, and the cost is the median of the ratios, beside the half of them in the middle. Prints a
Markdown table; docs/compress.md holds one such run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from benchmarks.calibrated import MODELS, folder_of
from benchmarks.texts import sentences

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch

SENTENCES, BATCHES = 600, 8
NAMES = {"minilm": "MiniLM", "llama": "built-in Llama"}
COLLECTED = ("inputs of layers", "inputs and gradients of all four projections", "gates")

Pass = Callable[["list[Batch]"], object]


def passes(name: str) -> tuple[list[Batch], Pass, dict[str, Pass]]:
    """Return batches, a plain forward pass, and every collection of `COLLECTED`."""
    import torch
    from tnlib_adapters import open_checkpoint
    from tnlib_adapters.compression.activation_statistics.selected_weights import components_of
    from tnlib_adapters.compression.activation_statistics.statistics import collect, collect_reads
    from tnlib_adapters.compression.calibration.calibrate import weighed_parts
    from tnlib_adapters.compression.calibration.collect_calibration import collect_calibration
    from tnlib_adapters.compression.options import Budget
    from tnlib_adapters.compression.request import Request
    from tnlib_adapters.compression.text import sample_batches
    from tnlib_adapters.instrument.running_model import open_running
    from tnlib_adapters.instrument.weight_inputs import find_places

    model, checkpoint = open_running(folder_of(name)), open_checkpoint(folder_of(name))
    text = "\n".join(sentences("docstrings", SENTENCES))
    batches = sample_batches(model.batches(text), 2**62)[:BATCHES]
    request = Request.of(Budget(keep=0.5), calibration="docstrings", what="attention")
    parts = collect_calibration(checkpoint, model, batches, weighed_parts, request)
    layers = [part.load() for part in parts.values()]
    places = find_places(model)

    def plain(some: list[Batch]) -> None:
        with torch.no_grad():
            for batch in some:
                model(batch)

    def inputs(some: list[Batch]) -> None:
        collect_reads(model, places, some)

    def moments(some: list[Batch]) -> None:
        collect(model, places, some)

    def gates(some: list[Batch]) -> None:
        collect(model, places, some, components=lambda k, _: components_of({k: layers[k]}) if k >= 0 else {})

    return batches, plain, dict(zip(COLLECTED, (inputs, moments, gates), strict=True))


def measure(name: str, rounds: int) -> list[str]:
    """Return what every collection costs on one model: its column of the table."""
    batches, plain, collections = passes(name)
    ratios: dict[str, list[float]] = {what: [] for what in collections}
    for k in range(rounds + 1):
        for batch in batches:
            once = _seconds(plain, batch)
            found = {what: _seconds(one, batch) / once for what, one in collections.items()}
            for what in found if k else ():  # the first round warms up
                ratios[what].append(found[what])
    quartiles = [statistics.quantiles(many, n=4) for many in ratios.values()]
    return [f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in quartiles]


def _seconds(one: Pass, batch: Batch) -> float:
    start = time.process_time()
    one([batch])
    return time.process_time() - start


@click.command()
@click.option("--model", "models", type=click.Choice(MODELS), multiple=True, default=MODELS)
@click.option("--rounds", default=4)
def main(models: tuple[str, ...], rounds: int) -> None:
    """Print the table."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    columns = [measure(name, rounds) for name in models]
    print(f"| collected | {' | '.join(NAMES[name] for name in models)} |\n|---{'|---' * len(models)}|")
    for what, *cells in zip(COLLECTED, *columns, strict=True):
        print(f"| {what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
