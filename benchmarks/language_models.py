"""SmolLM2-135M-Instruct compressed to several budgets, beside GPTQ on the same text: bytes, divergence and time.

    python -m benchmarks.smollm2
    python -m benchmarks.language_models [--model rotated] [--bits 3 ...] [--method gptq ...] [--write]

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
from benchmarks.quantizers import Grid, gptq, round_to_nearest
from benchmarks.rivals import RIVALS
from benchmarks.smollm2 import NAMES, smollm2
from benchmarks.texts import sentences
from tnlib._typing import Array

HERE = Path(__file__).parent
HEADING = "## Predictions of SmolLM2"
TOKENS, WINDOW = 16_384, 512
LLAMA_CPP = {4: "Q4_0", 3: "Q3_K_M", 2: "Q2_K"}  # its types by bits
METHODS = ("gptq", "low", "default", "high", *RIVALS, "llama.cpp")  # low to high are efforts of `compress`


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


def rounded_by_gptq(source: Path, out: Path, bits: int, what: str) -> None:
    """Write a copy of a Llama whose matrices are rounded and dequantized, and the number of bits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    windows = torch.from_numpy(calibration_windows(tokenizer))
    linear = {
        name: module
        for name, module in model.model.layers.named_modules()
        if isinstance(module, torch.nn.Linear) and (what == "all" or "self_attn" in name)
    }
    moments: dict[str, torch.Tensor] = {}

    def add(name: str) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            moments[name] = moments.get(name, 0) + x.T @ x

        return hook

    shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    hooks = [m.register_forward_pre_hook(add(name)) for name, m in linear.items() if name.split(".")[-1] not in shared]
    with torch.no_grad():
        for window in windows.split(4):
            model.model(window)
    for hook in hooks:
        hook.remove()
    n_bits = 0
    for name, module in linear.items():
        *parents, own = name.split(".")
        inputs = moments[".".join([*parents, shared.get(own, own)])].numpy()
        weight = module.weight.detach().numpy().T
        rounded = gptq(weight, inputs, Grid(bits, group=128), activation_order=True)
        n_bits += rounded.n_bits
        module.weight.data = torch.from_numpy(rounded.weight.T.astype(np.float32))
    if what == "all":
        tables = {id(t): t for t in (model.model.embed_tokens.weight, model.lm_head.weight)}
        for table in tables.values():
            rounded = round_to_nearest(table.detach().numpy().T, Grid(8, group=0), search=False)
            n_bits += rounded.n_bits
            table.data = torch.from_numpy(rounded.weight.T.astype(np.float32))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "bits.json").write_text(json.dumps(n_bits))


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


def run_row(model: str, method: str, bits: float, what: str, python: str, out: Path) -> dict[str, Any]:
    """Compress, and return seconds of CPU, peak memory in MB and MB of what was compressed."""
    import tnlib_adapters
    from transformers import AutoTokenizer

    source = smollm2(model)
    if source is None:
        raise SystemExit("language_models: SmolLM2 is not there; run python -m benchmarks.smollm2.")
    if method in RIVALS:
        return rounded_by_rival(method, python, source, out, int(bits))
    start = time.process_time()
    if method == "gptq":
        rounded_by_gptq(source, out, int(bits), what)
        n_bytes = json.loads((out / "bits.json").read_text()) / 8
    elif method == "llama.cpp":
        n_bytes = read_from_llama_cpp(source, out, LLAMA_CPP[int(bits)])
    else:
        text = out.with_name("calibration.txt")
        text.write_text(calibration_text(AutoTokenizer.from_pretrained(source)), encoding="utf-8")
        report = tnlib_adapters.compress(
            source,
            out,
            tnlib_adapters.Budget(bits=bits),
            calibration=tnlib_adapters.Calibration(text, window=WINDOW),
            what=what,
            effort=method,
        )
        n_bytes = report.average_bits * report.n_before / 8
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"seconds": seconds, "peak": peak, "bytes": n_bytes / 1e6}


def row(model: str, method: str, bits: float, what: str, python: str) -> str:
    """Return a row of the table."""
    import tnlib_adapters

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        command = [
            sys.executable,
            "-m",
            "benchmarks.language_models",
            "--row",
            model,
            method,
            str(bits),
            what,
            python,
            str(out),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        run = json.loads(done.stdout.splitlines()[-1])
        source = smollm2(model)
        measured = tnlib_adapters.evaluate(source, out, HERE / "prose_held_out.txt")
    cells = (
        what,
        f"{bits:g}",
        _title(method, bits, run),
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
    return "GPTQ" if method == "gptq" else f"tnlib, effort {method}"


@click.command()
@click.option("--model", type=click.Choice(tuple(NAMES)), default="rotated")
@click.option("--bits", multiple=True, type=float, default=(4.0, 3.0, 2.0))
@click.option("--what", multiple=True, default=("all",))
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS[:3])
@click.option("--rivals-python", "python", default=sys.executable, show_default="this one")
@click.option("--write", is_flag=True)
@click.option("--row", "arguments", nargs=6, hidden=True)
def main(
    model: str,
    bits: tuple[float, ...],
    what: tuple[str, ...],
    methods: tuple[str, ...],
    python: str,
    write: bool,
    arguments: tuple[str, ...] | None,
) -> None:
    if arguments:
        own, method, width, part, python, out = arguments
        print(json.dumps(run_row(own, method, float(width), part, python, Path(out))))
        return
    head = ("what", "bits", "method", "MB", "divergence", "perplexity before", "after", "CPU s", "peak MB")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    print(*lines, sep="\n", flush=True)
    for part in what:
        for width in bits:
            for method in methods:
                lines.append(row(model, method, width, part, python))
                print(lines[-1], flush=True)
    if write:
        write_table(HEADING, lines)


if __name__ == "__main__":
    main()
