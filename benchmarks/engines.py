"""SmolLM2-135M-Instruct in inference engines: file, resident memory, tokens per second and divergence by layout.

    python -m benchmarks.smollm2
    make engines        # once: installs the readers
    export READERS_PYTHON=~/.cache/tnlib-engines/readers/bin/python
    python -m benchmarks.engines [--bits 4.5] [--layout LAYOUT ...] [--folders FOLDER]

Linear layers are compressed to `--bits` on the text of `benchmarks.language_models`, without a fit. Every row loads one
folder in a process of its own, with two threads: memory is that of the process after it has generated, beyond that with
the same imports alone; speed that of 64 greedy tokens after a prompt of 64, the best of three. Divergence is that of
the engine's predictions from the original's, in nats per token, on four windows of 256 tokens of
`prose_held_out.txt`. In onnxruntime both tables are rounded to 8 bits by its builder. "gguf" rounds the table too, to
the bits that the type Q4_0 of llama.cpp's own quantizer takes with an importance matrix of the same text, the row after
it. --folders names a folder in which results are found, or kept. Prints a Markdown table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np
from tnlib_adapters.attention.softmax import log_softmax

from benchmarks.language_models import HERE, WINDOW, calibration_text
from benchmarks.llama_cpp_quantizer import average_bits, rounded_by_llama_cpp
from benchmarks.smollm2 import smollm2_or_exit

PROMPT = [*range(1000, 1064)]
COUNT = 64
N_WINDOWS = 4
SCRIPT = """
import json, sys, time, numpy
engine, folder, prompt, count = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
windows, out = numpy.load(sys.argv[5]), sys.argv[6]

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1e3

if engine == "onnxruntime-genai":
    import onnxruntime_genai as genai
    before = resident()
    model = genai.Model(folder)
    def generator(**options):
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, **options)
        return genai.Generator(model, parameters)
    def generate():
        own = generator(max_length=len(prompt) + count, min_length=len(prompt) + count)
        own.append_tokens(numpy.array(prompt, numpy.int32))
        while not own.is_done():
            own.generate_next_token()
    def logits(window):
        own = generator(max_length=len(window) + 1)
        own.append_tokens(window.astype(numpy.int32))
        return own.get_output("logits")[0].copy()
elif engine == "llama.cpp":
    import glob, os
    import llama_cpp
    before = resident()
    (file,) = glob.glob(folder + "/*.gguf") if os.path.isdir(folder) else [folder]
    def load(**options):
        return llama_cpp.Llama(file, n_ctx=512, n_threads=2, n_threads_batch=2, verbose=False, **options)
    model = load()
    def generate():
        model.reset()
        for _, token in zip(range(count), model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)):
            pass
    def logits(window):
        own = load(logits_all=True)
        own.eval(window.tolist())
        return own.scores[: len(window)].copy()
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
    def logits(window):
        with torch.no_grad():
            return model(torch.from_numpy(window)[None]).logits[0].float().numpy()
best = float("inf")
for _ in range(3):
    start = time.perf_counter()
    generate()
    best = min(best, time.perf_counter() - start)
memory = resident() - before
numpy.save(out, numpy.stack([logits(window) for window in windows]))
print(json.dumps([memory, count / best]))
"""
HERE_INSTALLED = ("transformers", "tnlib", "llama.cpp")
LAYOUTS = {
    "factored": "tnlib",
    "compressed-tensors": "transformers",
    "gptq": "gptqmodel",
    "gguf": "llama.cpp",
    "onnxruntime": "onnxruntime-genai",
}
EXPORT = (
    "disable_qkv_fusion=true",
    "shared_embeddings=false",
    "matmul_mixed_precision=last_matmul:int8",
    "op_types_to_quantize=MatMul/Gather",
)


def in_engine(engine: str, folder: Path, place: Path) -> tuple[float, float, np.ndarray]:
    """Return MB in memory, tokens per second, and the logits of the windows in `place`."""
    reader = sys.executable if engine in HERE_INSTALLED else os.environ["READERS_PYTHON"]
    files = [str(place / "windows.npy"), str(place / "logits.npy")]
    arguments = [reader, "-c", SCRIPT, engine, str(folder), json.dumps(PROMPT), str(COUNT), *files]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    if reader != sys.executable:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment)
    memory, speed = json.loads(done.stdout.splitlines()[-1])
    return memory, speed, np.load(files[1]).astype(np.float64)


def divergence(before: np.ndarray, after: np.ndarray) -> float:
    """Return the mean divergence of predictions, in nats per token."""
    logs = [log_softmax(logits) for logits in (before, after)]
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1).mean())


def graph_of(folder: Path, out: Path) -> Path:
    """Return the folder that the builder of onnxruntime-genai makes of a model."""
    if not out.exists():
        command = ["-m", "onnxruntime_genai.models.builder", "-m", folder.name, "-i", str(folder), "-o", str(out)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run = [os.environ["READERS_PYTHON"], *command, "-p", "int4", "-e", "cpu", "--extra_options", *EXPORT]
        subprocess.run(run, check=True, capture_output=True, env=environment)
    return out


def megabytes(folder: Path) -> float:
    """Return the MB of the weights in a folder, or of a file."""
    files = [folder] if folder.is_file() else folder.iterdir()
    names = (path for path in files if path.suffix in (".safetensors", ".onnx", ".data", ".gguf"))
    return sum(path.stat().st_size for path in names) / 1e6


@click.command()
@click.option("--bits", type=float, default=4.5, show_default=True)
@click.option("--layout", "layouts", type=click.Choice(list(LAYOUTS)), multiple=True, default=list(LAYOUTS))
@click.option("--folders", type=click.Path(path_type=Path))
def main(bits: float, layouts: tuple[str, ...], folders: Path | None) -> None:
    import tnlib_adapters
    from transformers import AutoTokenizer

    source = smollm2_or_exit()
    with tempfile.TemporaryDirectory() as scratch:
        place = folders or Path(scratch)
        place.mkdir(exist_ok=True)
        text = place / "calibration.txt"
        text.write_text(calibration_text(AutoTokenizer.from_pretrained(source)), encoding="utf-8")
        calibration = tnlib_adapters.Calibration(text, window=WINDOW)

        tokens = AutoTokenizer.from_pretrained(source)((HERE / "prose_held_out.txt").read_text())["input_ids"]
        np.save(place / "windows.npy", np.array(tokens[: N_WINDOWS * 256]).reshape(N_WINDOWS, 256))
        reference = None

        def row(layout: str, engine: str, folder: Path) -> None:
            nonlocal reference
            memory, speed, logits = in_engine(engine, folder, place)
            reference = logits if reference is None else reference
            cells = (layout, engine, f"{megabytes(folder):.0f}", f"{memory:.0f}", f"{speed:.1f}")
            print(f"| {' | '.join(cells)} | {divergence(reference, logits):.4f} |", flush=True)

        print("| layout | engine | MB | MB in memory | tokens per second | divergence |\n|---|---|---|---|---|---|")
        row("original, F32", "transformers", source)
        for layout in layouts:
            engine, options = LAYOUTS[layout], {"what": "linear"} if layout == "factored" else {}
            out, own_bits = place / layout, bits
            if layout == "gguf":
                theirs = rounded_by_llama_cpp(source, text.read_text(encoding="utf-8"), WINDOW, place / "Q4_0.gguf")
                own_bits = average_bits(theirs)
            if not out.exists():
                budget = tnlib_adapters.Budget(bits=own_bits)
                tnlib_adapters.compress(
                    source, out, budget, calibration=calibration, layout=layout, effort="low", **options
                )
            row(layout, engine, graph_of(out, place / "graph") if layout == "onnxruntime" else out)
            if layout == "gguf":
                row("llama.cpp's own Q4_0, importance matrix", engine, theirs)
            if layout == "onnxruntime":
                row("the builder's own 4 bits", engine, graph_of(source, place / "rounded"))


if __name__ == "__main__":
    main()
