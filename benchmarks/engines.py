"""SmolLM2-135M-Instruct in inference engines: file, resident memory, tokens per second and divergence by layout.

    python -m benchmarks.smollm2
    make engines        # once: installs the readers
    export READERS_PYTHON=~/.cache/tnlib-engines/readers/bin/python
    python -m benchmarks.engines [--bits 4.5] [--folders FOLDER]

Linear layers are compressed to `--bits` on the text of `benchmarks.language_models`, without a fit. Every row loads one
folder in a process of its own, with two threads: memory is that of the process after loading, beyond an empty one with
the same imports; speed that of 64 greedy tokens after a prompt of 64, the best of three. Divergence is that of the
predictions from the original's on `prose_held_out.txt`, in nats per token, of the weights as written. --folders names a
folder in which results are found, or kept. Prints a Markdown table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.language_models import HERE, WINDOW, calibration_text
from benchmarks.smollm2 import smollm2

PROMPT = [*range(1000, 1064)]
COUNT = 64
SCRIPT = """
import json, sys, time, resource
engine, folder, prompt, count = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1e3

if engine == "onnxruntime-genai":
    import numpy, onnxruntime_genai as genai
    before = resident()
    model = genai.Model(folder)
    def generate():
        options = genai.GeneratorParams(model)
        options.set_search_options(max_length=len(prompt) + count, min_length=len(prompt) + count, do_sample=False)
        generator = genai.Generator(model, options)
        generator.append_tokens(numpy.array(prompt, numpy.int32))
        while not generator.is_done():
            generator.generate_next_token()
else:
    import torch, transformers
    torch.set_num_threads(2)
    if engine == "gptqmodel":
        from gptqmodel import BACKEND, GPTQModel
        before = resident()
        model = GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH, dtype=torch.bfloat16).model
    else:
        if engine == "tnlib":
            import tnlib_adapters.transformers_plugin
        before = resident()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    def generate():
        x = torch.tensor([prompt])
        model.generate(x, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
loaded, best = resident() - before, float("inf")
for _ in range(4):
    start = time.perf_counter()
    generate()
    best = min(best, time.perf_counter() - start)
print(json.dumps([loaded, count / best]))
"""
EXPORT = ("disable_qkv_fusion=true", "shared_embeddings=false")


def in_engine(engine: str, folder: Path) -> tuple[float, float]:
    """Return MB in memory and tokens per second."""
    reader = sys.executable if engine in ("transformers", "tnlib") else os.environ["READERS_PYTHON"]
    arguments = [reader, "-c", SCRIPT, engine, str(folder), json.dumps(PROMPT), str(COUNT)]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    if reader != sys.executable:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment)
    memory, speed = json.loads(done.stdout.splitlines()[-1])
    return memory, speed


def graph_of(folder: Path, out: Path, *options: str) -> Path:
    """Return the folder that the builder of onnxruntime-genai makes of a model."""
    if not out.exists():
        command = ["-m", "onnxruntime_genai.models.builder", "-m", folder.name, "-i", str(folder), "-o", str(out)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run = [os.environ["READERS_PYTHON"], *command, "-p", "int4", "-e", "cpu", "--extra_options", *options]
        subprocess.run(run, check=True, capture_output=True, env=environment)
    return out


def megabytes(folder: Path) -> float:
    """Return the MB of the weights in a folder."""
    names = (path for path in folder.iterdir() if path.suffix in (".safetensors", ".onnx", ".data"))
    return sum(path.stat().st_size for path in names) / 1e6


@click.command()
@click.option("--bits", type=float, default=4.5, show_default=True)
@click.option("--folders", type=click.Path(path_type=Path))
def main(bits: float, folders: Path | None) -> None:
    import tnlib_adapters
    from transformers import AutoTokenizer

    source = smollm2("original")
    if source is None:
        raise SystemExit("engines: SmolLM2 is not there; run python -m benchmarks.smollm2.")
    with tempfile.TemporaryDirectory() as scratch:
        place = folders or Path(scratch)
        place.mkdir(exist_ok=True)
        text = place / "calibration.txt"
        text.write_text(calibration_text(AutoTokenizer.from_pretrained(source)), encoding="utf-8")
        calibration = tnlib_adapters.Calibration(text, window=WINDOW, statistics=place / "calibration.statistics")

        def row(layout: str, engine: str, folder: Path, divergence: str) -> None:
            memory, speed = in_engine(engine, folder)
            print(f"| {layout} | {engine} | {megabytes(folder):.0f} | {memory:.0f} | {speed:.1f} | {divergence} |")
            sys.stdout.flush()

        print("| layout | engine | MB | MB in memory | tokens per second | divergence |\n|---|---|---|---|---|---|")
        row("original, BF16", "transformers", source, "0")
        for layout, engine in (
            ("factored", "tnlib"),
            ("compressed-tensors", "transformers"),
            ("gptq", "gptqmodel"),
            ("onnxruntime", "onnxruntime-genai"),
        ):
            out, what = place / layout, {"what": "linear"} if layout == "factored" else {}
            if not out.exists():
                budget = tnlib_adapters.Budget(bits=bits)
                tnlib_adapters.compress(
                    source, out, budget, calibration=calibration, layout=layout, effort="low", **what
                )
            divergence = f"{tnlib_adapters.evaluate(source, out, HERE / 'prose_held_out.txt').divergence:.4f}"
            if layout == "onnxruntime":
                out = graph_of(out, place / "graph", *EXPORT, "nodes_to_exclude=/lm_head/MatMul")
            row(layout, engine, out, divergence)
        row("the builder's own 4 bits", "onnxruntime-genai", graph_of(source, place / "rounded", *EXPORT), "")


if __name__ == "__main__":
    main()
