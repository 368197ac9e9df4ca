"""Seconds, memory and errors of frozen models and score attributions, for a GPT-2 small with random weights.

python -m benchmarks.frozen_models     print the table of docs/circuits.md
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from tnlib_adapters import FrozenModel, circuits, freeze, open_checkpoint
from tnlib_adapters.reference.weights import Weights, read_weights

CHILD = "import sys; from benchmarks.frozen_models import measure; measure(*sys.argv[1:])"
RUNS = 5


def random_gpt2() -> Any:
    """Return GPT-2 small, 12 layers of 12 heads, with noise on every parameter."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def median_seconds(call: Callable[[np.ndarray], Any], inputs: list[Any]) -> float:
    """Return the median over the inputs."""
    seconds = []
    for value in inputs:
        start = time.perf_counter()
        call(value)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def rows(weights: Weights, n: int) -> list[tuple[str, float]]:
    """Return calls with their median seconds on texts of n tokens."""
    texts = [np.random.default_rng(seed).integers(0, 50257, n) for seed in range(RUNS)]
    models = [freeze(weights, text) for text in texts[:2]]
    measured = [
        ("freeze(weights, tokens)", median_seconds(lambda text: freeze(weights, text), texts)),
        ("logit_contributions(frozen, token).direct", median_seconds(lambda m: contributions(m).direct, models)),
        ("logit_contributions(frozen, token).through", median_seconds(lambda m: contributions(m).through, models)),
    ]
    if n == 128:
        measured.append(("qk_attributions(frozen)", median_seconds(circuits.qk_attributions, models)))
    return measured


def contributions(model: FrozenModel) -> circuits.LogitContributions:
    """Return the contributions to one logit."""
    return circuits.logit_contributions(model, 5)


def error(weights: Weights) -> float:
    """Return the relative error of the sum over paths against the stream of the model, on 64 tokens."""
    model = freeze(weights, np.random.default_rng(0).integers(0, 50257, 64))
    stream = model.apply(model.embedding)
    return float(np.linalg.norm(stream - model.stream) / np.linalg.norm(model.stream))


def measure(folder: str, dtype: str, n: str) -> None:
    """Print the rows of one precision and length."""
    weights = read_weights(open_checkpoint(folder), dtype=np.dtype(dtype))
    measured = rows(weights, int(n))
    status = Path("/proc/self/status").read_text(encoding="ascii")  # ru_maxrss includes the parent before exec
    peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
    for call, seconds in measured:
        print(f"| {dtype} | {n} | `{call}` | {seconds:.2f} | {peak:.2f} | {error(weights):.0e} |")


@click.command()
def main() -> None:
    """Print the table."""
    print("| precision | tokens | call | seconds | peak of the process, GiB | error of the sum over paths |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        random_gpt2().save_pretrained(folder)
        for dtype, n in (("float64", "64"), ("float32", "64"), ("float32", "128")):
            subprocess.run([sys.executable, "-c", CHILD, folder, dtype, n], check=True)


if __name__ == "__main__":
    main()
