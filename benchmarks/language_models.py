"""SmolLM2-135M-Instruct compressed to several budgets, beside GPTQ on the same text: bytes, divergence and time.

    python -m benchmarks.smollm2
    python -m benchmarks.language_models [--model rotated] [--bits 3 ...] [--method gptq ...] [--write]
    python -m benchmarks.language_models --keep 0.8 --keep 0.6 --what linear --method svd-llm --method low

Calibrates on `prose_calibration.txt` and on docstrings of Python, 16,384 tokens in windows of 512, and compares
predictions on `prose_held_out.txt`; both texts were written for this purpose. All matrices of the blocks and tables
are compressed ("all"), or the matrices of the attention. Divergence is that of the predictions from those of the
original, in nats per token. GPTQ (`benchmarks.quantizers`) rounds every matrix of the blocks by the inputs of the
original model, in groups of 128 with clipped ranges and activation order; tables are rounded to nearest in 8 bits.
Published libraries (`benchmarks.rivals`) round the matrices of the blocks of the same model on the same windows, and
tables are rounded as for GPTQ; --rivals-python names the Python of an environment in which the library is installed:

    pip install gptqmodel==7.7.0                             # GPTQMODEL_CPU_WORKERS=2 on two cores
    pip install auto-round==0.16.1 hqq==0.2.8.post1

"llama.cpp" is the quantizer of llama-cpp-python (`make engines`) with an importance matrix of the same text. It has no
types of fewer than 4 bits for rows of 576 entries, and takes types of more bits for them and for the tables.

With --keep instead of --bits matrices become two factors, with this fraction of the parameters of the blocks. SVD-LLM
truncates every matrix to the same fraction, by the inputs of the original model.

Every row is a process of its own; time is that of its CPU. Prints a Markdown table row by row; --write puts it into
docs/study.md.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from tnlib_adapters.checkpoints.modified import with_tensors

from benchmarks.calibrated import write_table
from benchmarks.llama_cpp_quantizer import rounded_by_llama_cpp
from benchmarks.quantizers import Grid, gptq, round_to_nearest, svd_llm
from benchmarks.rivals import RIVALS
from benchmarks.smollm2 import NAMES, smollm2_or_exit
from benchmarks.texts import sentences
from tnlib._typing import Array

HERE = Path(__file__).parent
HEADING = "## Predictions of SmolLM2"
TOKENS, WINDOW = 16_384, 512
LLAMA_CPP = {4: "Q4_0", 3: "Q3_K_M", 2: "Q2_K"}  # its types by bits
METHODS = ("gptq", "svd-llm", "low", "default", "high", *RIVALS, "llama.cpp")  # low to high: efforts of `compress`


def calibration_text(tokenizer: Any) -> str:
    """Return the calibration text, cut to `TOKENS` tokens: half prose, half docstrings."""
    prose = (HERE / "prose_calibration.txt").read_text(encoding="utf-8")
    docstrings = "\n".join(sentences("docstrings", 1000))
    halves = (tokenizer(text)["input_ids"][: TOKENS // 2] for text in (prose, docstrings))
    return "\n".join(tokenizer.decode(half) for half in halves)


def calibration_windows(tokenizer: Any) -> Array:
    """Return the token ids of the calibration text, (windows, tokens)."""
    ids = np.array(tokenizer(calibration_text(tokenizer))["input_ids"])
    return ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)


def linear_layers(model: Any, what: str) -> dict[str, Any]:
    """Return the linear layers of the blocks, or of their attention, by name."""
    import torch

    named = model.model.layers.named_modules()
    return {
        name: module
        for name, module in named
        if isinstance(module, torch.nn.Linear) and (what != "attention" or "self_attn" in name)
    }


def input_moments(model: Any, linear: Mapping[str, Any], windows: Array) -> dict[str, Array]:
    """Return the second moments of the inputs of linear layers."""
    import torch

    moments: dict[str, Any] = {}

    def add(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Any]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            moments[name] = moments.get(name, 0) + x.T @ x

        return hook

    shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    hooks = [m.register_forward_pre_hook(add(name)) for name, m in linear.items() if name.split(".")[-1] not in shared]
    with torch.no_grad():
        for window in torch.from_numpy(windows).split(4):
            model.model(window)
    for hook in hooks:
        hook.remove()
    sources = {}
    for name in linear:
        parent, _, last = name.rpartition(".")
        sources[name] = f"{parent}.{shared.get(last, last)}"
    return {name: moments[source].numpy() for name, source in sources.items()}


def compressed_by_matrix(method: str, source: Path, out: Path, size: float, what: str) -> float:
    """Write a copy of a Llama with matrices by GPTQ or SVD-LLM, multiplied out, and return the bytes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    linear = linear_layers(model, what)
    moments = input_moments(model, linear, calibration_windows(tokenizer))
    n_bits = 0
    for name, module in linear.items():
        weight = module.weight.detach().numpy().T
        if method == "gptq":
            rounded = gptq(weight, moments[name], Grid(int(size), group=128), activation_order=True)
            n_bits, product = n_bits + rounded.n_bits, rounded.weight
        else:
            rank = int(size * weight.size / sum(weight.shape))
            left, right = svd_llm(weight, moments[name]).first(rank)
            n_bits, product = n_bits + 16 * rank * sum(weight.shape), left @ right
        module.weight.data = torch.from_numpy(product.T.astype(np.float32))
    if what == "all":
        tables = {id(t): t for t in (model.model.embed_tokens.weight, model.lm_head.weight)}
        for table in tables.values():
            rounded = round_to_nearest(table.detach().numpy().T, Grid(8, group=0), search=False)
            n_bits += rounded.n_bits
            table.data = torch.from_numpy(rounded.weight.T.astype(np.float32))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return n_bits / 8


def rounded_by_rival(name: str, python: str, source: Path, out: Path, bits: int) -> dict[str, Any]:
    """Write a copy of a Llama rounded by a published library and dequantized, and return what the library reported."""
    import tnlib_adapters
    from transformers import AutoTokenizer

    windows, quantized = out.with_name("windows.npy"), out.with_name("quantized")
    np.save(windows, calibration_windows(AutoTokenizer.from_pretrained(source)))
    command = [python, "-P", str(HERE / "rivals.py"), name, str(source), str(windows), str(bits), str(quantized)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    read = tnlib_adapters.open_checkpoint(quantized)
    matrices = {name: t for name, t in read.folder.tensors.items() if len(t.shape) == 2}
    rounded = {
        name: round_to_nearest(table.read().T, Grid(8, group=0), search=False)
        for name, table in matrices.items()
        if "layers" not in name
    }
    changes = {name: partial(np.transpose, table.weight) for name, table in rounded.items()}
    tnlib_adapters.save_checkpoint(with_tensors(read, changes), out)
    n_bits = run["bits"] * sum(math.prod(t.shape) for name, t in matrices.items() if "layers" in name)
    return run | {"bytes": (n_bits + sum(table.n_bits for table in rounded.values())) / 8e6}


def read_from_llama_cpp(source: Path, out: Path, ftype: str) -> int:
    """Write a copy of a Llama that llama.cpp rounded, dequantized, and return the bytes of its rounded matrices."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    file = rounded_by_llama_cpp(source, calibration_text(tokenizer), WINDOW, out.with_name("model.gguf"), ftype)
    rounded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.load_state_dict(rounded.state_dict())  # transformers does not save what it read from GGUF
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) > 1)


def run_row(model: str, method: str, unit: str, size: float, what: str, python: str, out: Path) -> dict[str, Any]:
    """Compress, and return seconds of CPU, peak memory in MB and MB of what was compressed."""
    import tnlib_adapters
    from transformers import AutoTokenizer

    source = smollm2_or_exit(model)
    if method in RIVALS:
        return rounded_by_rival(method, python, source, out, int(size))
    start = time.process_time()
    if method in ("gptq", "svd-llm"):
        n_bytes = compressed_by_matrix(method, source, out, size, what)
    elif method == "llama.cpp":
        n_bytes = read_from_llama_cpp(source, out, LLAMA_CPP[int(size)])
    else:
        text = out.with_name("calibration.txt")
        text.write_text(calibration_text(AutoTokenizer.from_pretrained(source)), encoding="utf-8")
        report = tnlib_adapters.compress(
            source,
            out,
            tnlib_adapters.Budget(**{unit: size}),
            calibration=tnlib_adapters.Calibration(text, window=WINDOW),
            what=what,
            effort=method,
        )
        n_bytes = report.average_bits * report.n_before / 8 if unit == "bits" else 2 * report.n_after
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"seconds": seconds, "peak": peak, "bytes": n_bytes / 1e6}


def row(model: str, method: str, unit: str, size: float, what: str, python: str) -> str:
    """Return a row of the table."""
    import tnlib_adapters

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        arguments = (model, method, unit, str(size), what, python, str(out))
        command = [sys.executable, "-m", "benchmarks.language_models", "--row", *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        run = json.loads(done.stdout.splitlines()[-1])
        source = smollm2_or_exit(model)
        measured = tnlib_adapters.evaluate(source, out, HERE / "prose_held_out.txt")
    cells = (
        what,
        f"{size:g}",
        _title(method, size, run),
        f"{run['bytes']:.1f}",
        f"{measured.divergence:.3f}",
        f"{measured.perplexity_before:.1f}",
        f"{measured.perplexity_after:.1f}",
        f"{run['seconds']:.0f}",
        f"{run['peak']:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _title(method: str, bits: float, run: Mapping[str, Any]) -> str:
    if method in RIVALS:
        return f"{method} {run['version']}"
    if method == "llama.cpp":
        return f"llama.cpp {LLAMA_CPP[int(bits)]}"
    return {"gptq": "GPTQ", "svd-llm": "SVD-LLM"}.get(method, f"tnlib, effort {method}")


@click.command()
@click.option("--model", type=click.Choice(tuple(NAMES)), default="rotated")
@click.option("--bits", multiple=True, type=float, default=(4.0, 3.0, 2.0))
@click.option("--keep", multiple=True, type=float)
@click.option("--what", multiple=True, default=("all",))
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=("gptq", "low", "default"))
@click.option("--rivals-python", "python", default=sys.executable, show_default="this one")
@click.option("--write", is_flag=True)
@click.option("--row", "arguments", nargs=7, hidden=True)
def main(
    model: str,
    bits: tuple[float, ...],
    keep: tuple[float, ...],
    what: tuple[str, ...],
    methods: tuple[str, ...],
    python: str,
    write: bool,
    arguments: tuple[str, ...] | None,
) -> None:
    if arguments:
        name, method, unit, size, part, python, out = arguments
        print(json.dumps(run_row(name, method, unit, float(size), part, python, Path(out))))
        return
    unit = "keep" if keep else "bits"
    head = ("what", unit, "method", "MB", "divergence", "perplexity before", "after", "CPU s", "peak MB")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    print(*lines, sep="\n", flush=True)
    for part in what:
        for size in keep or bits:
            for method in methods:
                lines.append(row(model, method, unit, size, part, python))
                print(lines[-1], flush=True)
    if write:
        write_table(HEADING, lines)


if __name__ == "__main__":
    main()
