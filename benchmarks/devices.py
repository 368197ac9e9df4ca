"""Compression on a GPU beside the CPU of the same machine: seconds, peak memory and error.

    python -m benchmarks.devices [--device cuda] [--layers 4]

The built-in Llama, and a Llama of random weights with the layers of a model of 1.1 billion parameters (d_model 2048, 32
heads on 4 key and value heads, bf16), all weights. Every row is a process of its own. Time is wall-clock time of
`compress`, its measurement on held-out text included. Prints a Markdown table;
docs/compression-resources.md holds one such run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from benchmarks.large_models import Llama, calibration_text, make
from benchmarks.texts import sentences

CHILD = "import sys; from benchmarks.devices import run; run(*sys.argv[1:])"
BUILTIN = "built-in Llama, 3 bits"


def run(source: str, text: str, bits: str, effort: str, device: str, dtype: str) -> None:
    """Compress in this process, and print seconds, peak memory and error."""
    import tnlib_adapters
    import torch
    from tnlib_adapters.files.process_memory import peak_memory

    if device != "cpu":
        torch.zeros(1, device=device)  # the start of the device is not the compression's
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        report = tnlib_adapters.compress(
            source,
            Path(scratch) / "out",
            tnlib_adapters.Budget(bits=float(bits)),
            calibration=text,
            effort=effort,
            run=tnlib_adapters.Run(device=device, dtype=dtype),
        )
        seconds = time.perf_counter() - started
    on_device = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
    print(json.dumps([seconds, peak_memory() / 1e9, on_device / 1e9, report.measured]))


@click.command()
@click.option("--device", default="cuda")
@click.option("--layers", default=4)
def main(device: str, layers: int) -> None:
    import tnlib_adapters

    print(
        "| model | device | dtype | s | peak GB | peak GB on the device | divergence |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        text, large = Path(folder) / "text.txt", Path(folder) / "large"
        text.write_text("\n".join(sentences("docstrings", 600)), encoding="utf-8")
        make(Llama(layers, 2048, 32, 4, 5632, 32_000), large)
        own = calibration_text(large, 8192)
        cases = [
            (BUILTIN, tnlib_adapters.builtin_path("llama"), text, "3", "default"),
            (f"{layers} layers of the 1.1B shape, 4 bits, effort low", large, own, "4", "low"),
        ]
        for name, source, calibration, bits, effort in cases:
            for place, dtype in (("cpu", "float32"), (device, "float32"), (device, "bfloat16")):
                command = [sys.executable, "-c", CHILD, str(source), str(calibration), bits, effort, place, dtype]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                seconds, peak, on_device, error = json.loads(done.stdout.splitlines()[-1])
                row = (name, place, dtype, f"{seconds:.1f}", f"{peak:.2f}", f"{on_device:.2f}", f"{error:.4f}")
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
