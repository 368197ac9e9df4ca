"""Accuracy at an average number of bits per weight: `compress --bits` beside published quantizers and low-rank factors.

    python -m benchmarks.bits [--model minilm|llama] [--what attention|all ...] [--bits 4 ...] [--method gptq ...] \
        [--text both ...] [--seed 0 ...] [--range] [--write]

Models, calibration texts and test sentences are those of benchmarks.calibrated. The bits of a row are everything that
is stored for the compressed part, biases in the dtype of the checkpoint included, per number before. Every method takes
its largest setting within the budget. --range calibrates on every text and adds the range over them. --write merges the
rows into docs/tables. Rows of baselines take seconds, those of tnlib minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from tnlib_adapters import Budget
from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
from tnlib_adapters.compression.calibration.collect_calibration import StatisticsPasses
from tnlib_adapters.compression.calibration.group_moments import RoundingMoments
from tnlib_adapters.compression.calibration.statistics import Statistics
from tnlib_adapters.compression.compressed_part import compressed_weights
from tnlib_adapters.compression.evaluate import Reference
from tnlib_adapters.compression.methods.components import Components, table_components
from tnlib_adapters.compression.methods.decompositions import has_rotary_or_norms
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.progress import quiet
from tnlib_adapters.compression.text import sample_batches
from tnlib_adapters.factors import UNEMBEDDING
from tnlib_adapters.factors.model_weights import ModelWeight, biases_of, count_parameters, n_bytes
from tnlib_adapters.factors.projections import NAMES
from tnlib_adapters.instrument.block_passes import Streams
from tnlib_adapters.instrument.running_model import Batch, RunningModel, find_matrix, open_running
from tnlib_adapters.instrument.weight_inputs import WeightUses, find_uses, input_of

from benchmarks import calibrated
from benchmarks.baselines import BASELINES, Part, Parts
from benchmarks.quantizers import two_sided
from benchmarks.study_tables import Row, merged, read_rows, write_rows
from benchmarks.texts import TEST_KINDS, tested_sentences
from tnlib._typing import Array

if TYPE_CHECKING:
    import torch
    from torch import nn

WHAT = ("attention", "all")
TABLES = {(model, what): f"bits-{model}-{what}" for model in calibrated.MODELS for what in WHAT}
KEY = ("method", "budget", "text", "seed")  # columns that name a row
RANGE = "range over"  # first words of the column "text" in rows that summarise others
_TOKENS = 65_536
# Inputs whose scales AWQ multiplies into the norm or the weight before. A norm of BERT also feeds the residual stream,
# the heads of a group of queries share their values, and a GELU does not commute with scales.
FOLDED = {"llama": ("x", "gate_proj", "up_proj", "down_proj"), "bert": ("y",)}

Measurement = tuple[str, float, "list[calibrated.Measured]", float]  # setting, bits per number, of each test, seconds
TNLIB = "quantized"  # the method of tnlib that `compress --bits` selects
METHODS = (*BASELINES, TNLIB)
NO_TEXT = ("nearest", "nearest, symmetric")


def _inputs(model: RunningModel, batch: Batch, uses: WeightUses) -> dict[str, Array]:
    """Return the inputs (tokens, width) of the weights by key; a last entry 1 multiplies the bias of q, k and v."""
    import torch

    inputs: dict[str, torch.Tensor] = {}
    own = {use.reads: use for use in uses.values() if not use.is_table}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for key, use in own.items():
            hooks.enter_context(input_of(use.module, inputs, key))
        model(batch)
    arrays = dict[str, Array]()
    for key, use in own.items():
        x = inputs[key].reshape(*batch.ids.shape, -1)[batch.valid].double().numpy()
        with_bias = use.projection is not None and use.projection.name != "o"
        arrays[key] = np.pad(x, ((0, 0), (0, 1)), constant_values=1.0) if with_bias else x
    return arrays


def collect(
    model: RunningModel, uses: WeightUses, batches: Sequence[Batch], workspace: Workspace | None = None
) -> Statistics:
    """Return the statistics of the batches, for rounding; without a workspace all is in memory."""
    kept = dict[str, Array](), dict[str, Array](), dict[str, Array]()

    streams = Streams(batches, model.sizes.d_model)
    moments_of = partial(RoundingMoments, model, batches, workspace or Workspace())
    passes = StatisticsPasses(model, uses, batches, streams, moments_of, quiet)
    for _, statistics in passes.run():
        for part, arrays in zip(kept, (statistics.reads, statistics.slopes, statistics.scales), strict=True):
            part.update(arrays)
    return Statistics(*kept)


class Subject:
    """A model whose weights are replaced in memory, and compared with the original."""

    def __init__(self, source: Path, what: str, tests: Sequence[str]) -> None:
        self.source, self.what, self.tests = source, what, tests
        self.checkpoint = open_checkpoint(source)
        self._original, self._changed = open_running(source), open_running(source)
        self._references = [Reference(self._original, test) for test in tests]
        self._weights = compressed_weights(self.checkpoint, what, with_text=True)
        self.bias_bits = 8 * n_bytes(biases_of(self._weights).values())
        self.n_before = count_parameters(self._weights)

    def parts(self, text: str) -> Parts:
        """Return the weights with the statistics of a calibration text."""
        model = self._original
        batches = sample_batches(model.batches(text), _TOKENS)
        uses = find_uses(model, self._weights)
        collected = collect(model, uses, batches)
        sums, squares = dict[str, Array](), dict[str, Array]()
        for batch in batches:
            for key, x in _inputs(model, batch, uses).items():
                sums[key] = sums.get(key, 0) + np.abs(x).sum(0)
                squares[key] = squares.get(key, 0) + x.T @ x
        n_tokens = sum(batch.n_tokens for batch in batches)
        # the published methods do not weight tokens by gradients
        reads = {key: squares.get(key, moments) / n_tokens for key, moments in collected.reads.items()}
        slopes = {key: moments / n_tokens for key, moments in collected.slopes.items()}
        magnitudes = {key: total / n_tokens for key, total in sums.items()}
        parts, model_type = [], self.checkpoint.wiring.model_type
        for k in range(self.checkpoint.n_layers):
            projections = self.checkpoint.projections(k)
            biases = projections.biases
            for name in NAMES:
                weight = projections.weights[name]
                key, of = f"{k}.{name}", f"{k}.{'y' if name == 'o' else 'x'}"
                n = len(weight)  # the last input of x is 1, for the bias
                folded = of.partition(".")[2] in FOLDED.get(model_type, ())
                statistics = reads[of][:n, :n], magnitudes[of][:n], slopes[key]
                with_bias = np.vstack([weight, biases.get(name, np.zeros(weight.shape[1]))])
                outputs = None if name == "o" else with_bias.T @ reads[of] @ with_bias
                parts.append(Part(key, weight.astype(np.float64), *statistics, folded, outputs=outputs, layer=k))
        parts += [self._part(own, reads, magnitudes, slopes) for own in self._weights if not own.of]
        return Parts(parts, self.checkpoint.sizes, has_rotary_or_norms(self.checkpoint))

    def _part(
        self, own: ModelWeight, reads: dict[str, Array], magnitudes: dict[str, Array], slopes: dict[str, Array]
    ) -> Part:
        """Return a weight that is no projection."""
        name, weight = own.module, own.read().astype(np.float64)
        if own.role == UNEMBEDDING:
            uses = [(slopes[name], reads[name])]
            return Part(name, weight, reads[name], magnitudes[name], None, factors=lambda: _of_table(weight.T, uses))
        if not own.is_table:
            folded = name.rpartition(".")[2] in FOLDED.get(self.checkpoint.wiring.model_type, ())
            return Part(name, weight, reads[name], magnitudes[name], slopes[name], folded, layer=own.group)
        tied, width = own.tied_key, weight.shape[1]
        if tied is None:
            by_output = np.eye(width), np.ones(width), None, False
            return Part(name, weight.T, *by_output, lambda: two_sided(weight.T, slopes[name], reads[name]))
        looked_up = weight.T @ (reads[name][:, None] * weight), slopes[name]
        uses = [looked_up, (slopes[tied], reads[tied])]
        return Part(name, weight.T, reads[tied], magnitudes[tied], None, factors=lambda: _of_table(weight, uses))

    def compare(self, parts: Sequence[Part], weights: Sequence[Array]) -> list[calibrated.Measured]:
        """Return the measures of the model with these weights (in, out), for every test."""
        import torch

        for part, weight in zip(parts, weights, strict=True):
            stored = self._module(part.key).get_parameter("weight")
            # transformers holds linear layers and tables as (out, in)
            with torch.no_grad():
                stored.copy_(torch.from_numpy(weight.T))
        return [reference.compare(self._changed).measures() for reference in self._references]

    def _module(self, key: str) -> nn.Module:
        layer, _, name = key.partition(".")
        if name in NAMES and layer.isdigit():
            return self._changed.layers[int(layer)].projections[name].module
        return find_matrix(self._changed, key)


def _of_table(table: Array, uses: Sequence[tuple[Array, Array]]) -> Components:
    """Return the components (width, vocab) of a table (vocab, width); losses in the unit of `two_sided`."""
    of_rows = table_components(table, uses)
    return Components(of_rows.right.T, of_rows.left.T, of_rows.losses)


def compressed(source: Path, what: str, budget: float, text: str, tests: Sequence[str]) -> Measurement:
    """Return what `compress --bits` does, as a user calls it."""
    import tnlib_adapters

    with tempfile.TemporaryDirectory() as scratch:
        out, files = Path(scratch) / "out", [Path(scratch) / f"text{k}" for k in range(1 + len(tests))]
        for file, words in zip(files, (text, *tests), strict=True):
            file.write_text(words, encoding="utf-8")
        start = time.process_time()
        report = tnlib_adapters.compress(
            source, out, Budget(bits=budget), calibration=files[0], what=what, method=TNLIB
        )
        spent = time.process_time() - start
        bits = 8 * report.compressed(report.bytes_after) / report.n_before
        return "", bits, [tnlib_adapters.evaluate(source, out, file).measures() for file in files[1:]], spent


def measurements(
    subject: Subject, text: str, methods: Sequence[str], budgets: Sequence[float]
) -> Iterator[tuple[str, float, Measurement]]:
    """Yield method, budget and measurement on one calibration text; seconds are those of statistics and method."""
    start = time.process_time()
    model = subject.parts(text) if {*methods} - {TNLIB} else None
    statistics_seconds = time.process_time() - start
    for method in methods:
        measured: dict[str, list[calibrated.Measured]] = {}  # several budgets may have one setting
        for budget in budgets:
            if method == TNLIB:
                yield method, budget, compressed(subject.source, subject.what, budget, text, subject.tests)
                continue
            start = time.process_time()
            result = BASELINES[method](model, int(budget * subject.n_before) - subject.bias_bits)
            spent = time.process_time() - start + (0 if method in NO_TEXT else statistics_seconds)
            if result is None:
                continue
            setting, weights, n_bits = result
            bits = (n_bits + subject.bias_bits) / subject.n_before
            if (key := f"{setting} {bits}") not in measured:
                measured[key] = subject.compare(model.parts, weights)
            yield method, budget, (setting, bits, measured[key], spent)


def row_of(method: str, budget: float, text: str, seed: int, measurement: Measurement) -> dict[str, str]:
    """Return the cells of a row by column."""
    setting, bits, measured, spent = measurement
    cells = {"method": method, "setting": setting, "budget": f"{budget:g}", "bits": f"{bits:.3f}", "text": text}
    measures = {
        f"{kind}: {name}": f"{value:.4f}"
        for kind, measures_of_kind in zip(TEST_KINDS, measured, strict=True)
        for name, value in measures_of_kind.items()
    }
    return cells | {"seed": str(seed)} | measures | {"CPU s": f"{spent:.0f}"}


def ranges(rows: Sequence[Row]) -> list[Row]:
    """Return for every method and budget the range over texts and seeds of all that was measured."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["budget"]), []).append(row)
    summaries = []
    for group in groups.values():
        if len(group) > 1:
            names = [name for name in group[0] if ": " in name]
            values = calibrated.range_of([[float(row[name]) for row in group] for name in names])
            seconds = [float(row["CPU s"]) for row in group]
            summary = group[0] | dict(zip(names, values, strict=True))
            summary |= {"setting": "", "text": f"{RANGE} {len(group)} texts", "seed": ""}
            summaries.append(summary | {"CPU s": f"{min(seconds):.0f} to {max(seconds):.0f}"})
    return summaries


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows by method, text, seed and descending budget."""

    def place(row: Row) -> tuple[int, bool, str, str, float]:
        in_range = row["text"].startswith(RANGE)
        return METHODS.index(row["method"]), in_range, row["text"], row["seed"], -float(row["budget"])

    return sorted(rows, key=place)


def table_of(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table."""
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (rows[0], *(row.values() for row in rows))]
    return [head, "|---" * len(rows[0]) + "|", *lines]


@click.command()
@click.option("--model", type=click.Choice(calibrated.MODELS), default="minilm")
@click.option("--what", "whats", type=click.Choice(WHAT), multiple=True, default=("attention",))
@click.option("--bits", "budgets", type=float, multiple=True, default=(4.5, 4.0, 3.5, 3.0, 2.5, 2.0))
@click.option("--method", "methods", type=click.Choice(METHODS), multiple=True, default=METHODS)
@click.option("--text", "texts", type=click.Choice(tuple(calibrated.TEXTS)), multiple=True, default=("both",))
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), help="Which sentences are calibrated on.")
@click.option("--range", "ranged", is_flag=True, help="Calibrate on every text, and add the range over the texts.")
@click.option("--write", is_flag=True, help="Merge the rows into docs/tables.")
def main(
    model: str,
    whats: tuple[str, ...],
    budgets: tuple[float, ...],
    methods: tuple[str, ...],
    texts: tuple[str, ...],
    seeds: tuple[int, ...],
    ranged: bool,
    write: bool,
) -> None:
    tests = ["\n".join(tested_sentences(kind)) for kind in TEST_KINDS]
    for what in whats:
        subject, rows = Subject(calibrated.folder_of(model), what, tests), list[Row]()
        for turn, (text, seed) in enumerate(itertools.product(tuple(calibrated.TEXTS) if ranged else texts, seeds)):
            calibrated_methods = [method for method in methods if turn == 0 or method not in NO_TEXT]
            words = calibrated.calibration_text(text, seed)
            for method, budget, measurement in measurements(subject, words, calibrated_methods, budgets):
                rows.append(row_of(method, budget, text, seed, measurement))
                print("\n".join(table_of(rows) if len(rows) == 1 else table_of(rows[-1:])[-1:]), flush=True)
        if ranged:
            rows += (summaries := ranges(rows))
            print("\n".join(table_of(summaries)[2:]))
        if write:
            name = TABLES[model, what]
            write_rows(name, in_order(merged(read_rows(name), rows, KEY)))


if __name__ == "__main__":
    main()
