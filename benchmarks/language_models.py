"""SmolLM2-135M-Instruct compressed to several budgets, beside GPTQ on the same text: bytes, divergence and time.

    python -m benchmarks.smollm2
    python -m benchmarks.language_models [--model rotated] [--bits 3 ...] [--method gptq ...] [--write]

Calibrates on `prose_calibration.txt` and on docstrings of Python, 16,384 tokens in windows of 512, and compares
predictions on `prose_held_out.txt`; both texts were written for this purpose. All matrices of the blocks and tables
are compressed ("all"), or the matrices of the attention. Divergence is that of the predictions from those of the
original, in nats per token. GPTQ (`benchmarks.quantizers`) rounds every matrix of the blocks by the inputs of the
original model, in groups of 128 with clipped ranges and activation order; tables are rounded to nearest in 8 bits.
Every row is a process of its own with two threads; time is that of its CPU. Prints a Markdown table row by row; --write
puts it into docs/study.md.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.calibrated import write_table
from benchmarks.quantizers import Grid, gptq, round_to_nearest
from benchmarks.smollm2 import NAMES, smollm2
from benchmarks.texts import sentences

HERE = Path(__file__).parent
HEADING = "## Predictions of SmolLM2"
TOKENS, WINDOW = 16_384, 512
METHODS = ("gptq", "low", "default", "high")  # the last three are efforts of `compress`


def calibration_text(tokenizer: Any) -> str:
    """Return the calibration text, cut to `TOKENS` tokens: half prose, half docstrings."""
    prose = (HERE / "prose_calibration.txt").read_text(encoding="utf-8")
    docstrings = "\n".join(sentences("docstrings", 1000))
    halves = (tokenizer(text)["input_ids"][: TOKENS // 2] for text in (prose, docstrings))
    return "\n".join(tokenizer.decode(half) for half in halves)


def rounded_by_gptq(source: Path, out: Path, bits: int, what: str) -> None:
    """Write a copy of a Llama whose matrices are rounded and dequantized, and the number of bits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.tensor(tokenizer(calibration_text(tokenizer))["input_ids"])
    windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
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


def run_row(model: str, method: str, bits: float, what: str, out: Path) -> dict[str, float]:
    """Compress in this process, and return seconds of CPU, peak memory in MB and MB of what was compressed."""
    import tnlib_adapters
    from transformers import AutoTokenizer

    source = smollm2(model)
    if source is None:
        raise SystemExit("language_models: SmolLM2 is not there; run python -m benchmarks.smollm2.")
    start = time.process_time()
    if method == "gptq":
        rounded_by_gptq(source, out, int(bits), what)
        n_bytes = json.loads((out / "bits.json").read_text()) / 8
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


def row(model: str, method: str, bits: float, what: str) -> str:
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
            str(out),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        run = json.loads(done.stdout.splitlines()[-1])
        source = smollm2(model)
        measured = tnlib_adapters.evaluate(source, out, HERE / "prose_held_out.txt")
    cells = (
        what,
        f"{bits:g}",
        "GPTQ" if method == "gptq" else f"tnlib, effort {method}",
        f"{run['bytes']:.1f}",
        f"{measured.divergence:.3f}",
        f"{measured.perplexity_before:.1f}",
        f"{measured.perplexity_after:.1f}",
        f"{run['seconds']:.0f}",
        f"{run['peak']:.0f}",
    )
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option("--model", type=click.Choice(tuple(NAMES)), default="rotated")
@click.option("--bits", multiple=True, type=float, default=(4.0, 3.0, 2.0))
@click.option("--what", multiple=True, default=("all",))
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS[:3])
@click.option("--write", is_flag=True)
@click.option("--row", "arguments", nargs=5, hidden=True)
def main(
    model: str,
    bits: tuple[float, ...],
    what: tuple[str, ...],
    methods: tuple[str, ...],
    write: bool,
    arguments: tuple[str, ...] | None,
) -> None:
    if arguments:
        own, method, width, part, out = arguments
        print(json.dumps(run_row(own, method, float(width), part, Path(out))))
        return
    head = ("what", "bits", "method", "MB", "divergence", "perplexity before", "after", "CPU s", "peak MB")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    print(*lines, sep="\n", flush=True)
    for part in what:
        for width in bits:
            for method in methods:
                lines.append(row(model, method, width, part))
                print(lines[-1], flush=True)
    if write:
        write_table(HEADING, lines)


if __name__ == "__main__":
    main()
