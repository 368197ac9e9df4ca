"""Accuracy at an average number of bits per weight: `compress --bits` beside published quantizers and low-rank factors.

    python -m benchmarks.bits [--model minilm|llama] [--what attention|all ...] [--bits 4 ...] [--method gptq ...] \
        [--text both ...] [--seed 0 ...] [--range] [--write]

Models, calibration texts and test sentences are those of benchmarks.calibrated. The bits of a row are everything that
is stored for the compressed part, biases in the dtype of the checkpoint included, per number before. Every method takes
its largest setting within the budget. --range calibrates on every text and adds the range over them. --write merges the
rows into docs/study.md. Rows of baselines take seconds, those of tnlib minutes.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from tnlib_adapters.architectures.attention_sizes import Sizes
from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
from tnlib_adapters.compression.calibration.statistics import Statistics, collect
from tnlib_adapters.compression.calibration.text import sample_batches
from tnlib_adapters.compression.evaluation.evaluate import evaluate_running
from tnlib_adapters.compression.methods.components import Components, table_components
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.other_matrices import names_of, read_weight
from tnlib_adapters.factors.projections import NAMES
from tnlib_adapters.instrument.running_model import Batch, RunningModel, find_matrix, open_running
from tnlib_adapters.instrument.weight_inputs import find_places, read

from benchmarks import calibrated
from benchmarks.quantizers import (
    SCALE_BITS,
    Grid,
    Rounded,
    awq,
    count_component,
    global_ranks,
    gptq,
    largest_products,
    largest_units,
    low_rank,
    nystroem,
    query_key_basis,
    round_to_nearest,
    stored,
    svd_llm,
    two_sided,
    value_basis,
)
from benchmarks.texts import sentences
from tnlib._typing import Array

if TYPE_CHECKING:
    from torch import Tensor, nn

WHAT = ("attention", "all")
HEADINGS = {
    ("minilm", "attention"): "### Bits of the attention of MiniLM",
    ("llama", "attention"): "### Bits of the attention of the built-in Llama",
    ("llama", "all"): "### Bits of all of the built-in Llama",
}
KEY = ("method", "budget", "text", "seed")  # columns that name a row
RANGE = "range over"  # first words of the column "text" in rows that summarise others
GRIDS = [(bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128, 0)]
_TOKENS = 65_536
# Inputs whose scales AWQ multiplies into the norm or the weight before. A norm of BERT also feeds the residual stream,
# the heads of a group of queries share their values, and a GELU does not commute with scales.
FOLDED = {"llama": ("x", "gate_proj", "up_proj", "down_proj"), "bert": ("y",)}


@dataclass(frozen=True)
class Part:
    """A weight of the compressed part, with the statistics of a text.

    Parameters
    ----------
    key
        Key of its statistics.
    weight
        (in, out). A table of embeddings is (width, vocab): the unembedding, if it is one as well.
    reads, magnitudes
        (in, in) and (in,), second moments and mean absolute values of the inputs; the identity and 1 for a table that
        is no unembedding.
    slopes
        Second moments of the gradients at the output; None for a table.
    folded
        True if scales of the inputs can be multiplied into the norm or the weight before.
    factors
        Returns the components of a table by its statistics in both uses.
    outputs
        (out, out), second moments of queries, keys and values with their biases; None for other weights.
    layer
        Its layer; None for a table.
    """

    key: str
    weight: Array
    reads: Array
    magnitudes: Array
    slopes: Array | None
    folded: bool = False
    factors: Callable[[], Components] | None = None
    outputs: Array | None = None
    layer: int | None = None

    @cached_property
    def whitened(self) -> Components:
        """Components by input moments."""
        return svd_llm(self.weight, self.reads)

    @cached_property
    def two_sided(self) -> Components:
        """Components by input moments and output gradients."""
        return self.factors() if self.factors else two_sided(self.weight, self.reads, self.slopes)


@dataclass(frozen=True)
class Parts:
    """All weights of the compressed part; a layer has "q", "k", "v" and "o" before the weights of its MLP."""

    parts: list[Part]
    sizes: Sizes
    rotary: bool

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the weights."""
        return [part.weight.shape for part in self.parts]


Rounding = Callable[[Part, Grid], Rounded]
Result = tuple[str, list[Array], int]  # setting, weights, bits without those of biases
Baseline = Callable[[Parts, int], "Result | None"]  # weights and budget in bits -> None if nothing is within it
Measurement = tuple[str, float, "list[calibrated.Measured]", float]  # setting, bits per number, of each test, seconds


def rounding(function: Rounding, *, symmetric: bool = False) -> Baseline:
    """Return a baseline that rounds every weight to the grid with most bits within the budget."""

    def run(model: Parts, budget: int) -> Result | None:
        grid = largest_grid(model.shapes, budget, symmetric=symmetric)
        if grid is None:
            return None
        rounded = [function(part, grid) for part in model.parts]
        return str(grid), [one.weight for one in rounded], sum(one.n_bits for one in rounded)

    return run


def scaled(model: Parts, budget: int) -> Result | None:
    """Round every weight by AWQ; weights with the same input share its scales."""
    parts, groups = model.parts, dict[bytes, list[int]]()
    for k, part in enumerate(parts):
        groups.setdefault(part.magnitudes.tobytes() + part.reads.tobytes(), []).append(k)
    first = [parts[own[0]] for own in groups.values()]
    n_scale_bits = sum(SCALE_BITS * len(part.weight) for part in first if not part.folded)
    grid = largest_grid(model.shapes, budget - n_scale_bits)
    if grid is None:
        return None
    weights, n_bits = [part.weight for part in parts], 0
    for part, own in zip(first, groups.values(), strict=True):
        beside = np.concatenate([weights[k] for k in own], axis=1)
        rounded = awq(beside, part.reads, part.magnitudes, grid, folded=part.folded)
        n_bits += rounded.n_bits
        ends = np.cumsum([weights[k].shape[1] for k in own])[:-1]
        for k, weight in zip(own, np.split(rounded.weight, ends, axis=1), strict=True):
            weights[k] = weight
    return str(grid), weights, n_bits


def truncation(factors: Callable[[Part], Components], bits: int, *, of_model: bool) -> Baseline:
    """Return a baseline that truncates all weights: by the same fraction, or with ranks of one budget `of_model`."""

    def run(model: Parts, budget: int) -> Result | None:
        components, total = [factors(part) for part in model.parts], sum(m * n for m, n in model.shapes)
        if of_model:
            ranks = global_ranks(components, budget, bits)
        else:
            ranks = [min(m, n, budget * m * n // total // count_component((m, n), bits)) for m, n in model.shapes]
        products = [low_rank(one, rank, bits) for one, rank in zip(components, ranks, strict=True)]
        setting = f"ranks {min(ranks)} to {max(ranks)}"
        return setting, [one.weight for one in products], sum(one.n_bits for one in products)

    return run


def blocks(bits: int, *, a3: bool) -> Baseline:
    """Return MoDeGPT or A3: hidden units removed between two weights, the same fraction of all; tables by SVD-LLM."""

    def run(model: Parts, budget: int) -> Result | None:
        share = budget / sum(m * n for m, n in model.shapes)  # bits per number
        weights, n_bits, ranks = [part.weight.copy() for part in model.parts], 0, []
        by_layer: dict[int | None, list[int]] = {}
        for k, part in enumerate(model.parts):
            by_layer.setdefault(part.layer, []).append(k)
        for layer, own in by_layer.items():
            if layer is None:
                for k in own:
                    m, n = model.shapes[k]
                    rank = min(m, n, int(share * m * n) // count_component((m, n), bits))
                    product = low_rank(model.parts[k].whitened, rank, bits)
                    weights[k], n_bits = product.weight, n_bits + product.n_bits
                continue
            found = _fewer_dimensions(model, own[:4], weights, share, bits, a3=a3)
            ranks, n_bits = [*ranks, *found[0]], n_bits + found[1]
            if own[4:]:
                rank, count = _fewer_units(model, own[4:], weights, share, bits, a3=a3)
                ranks, n_bits = [*ranks, rank], n_bits + count
        return f"ranks {min(ranks)} to {max(ranks)}", weights, n_bits

    return run


def _fewer_dimensions(
    model: Parts, own: Sequence[int], weights: list[Array], share: float, bits: int, *, a3: bool
) -> tuple[list[int], int]:
    """Truncate the dimensions of all heads of a layer in place; return ranks of queries and values, and all bits."""
    sizes, (q, k, v, o) = model.sizes, own
    n_shared, (of_q, of_k, of_v) = sizes.n_heads // sizes.kv_heads, (model.parts[one].outputs for one in own[:3])
    n_inputs, n_outputs = len(weights[q]), weights[o].shape[1]
    per_scale = 0 if bits == 16 else SCALE_BITS
    # of one dimension: its columns of queries and keys; its column of values and its rows of outputs
    lengths = (1 + n_shared) * n_inputs, n_inputs + n_shared * n_outputs
    costs = lengths[0] * bits + (1 + n_shared) * per_scale, lengths[1] * bits + 2 * per_scale
    total = sizes.kv_heads * (lengths[0] * sizes.d_head + lengths[1] * sizes.d_value)
    step = 2 if model.rotary else 1
    rank = min(sizes.d_head, int(share * lengths[0] * sizes.d_head) // costs[0] // step * step)
    left = int(share * total) - sizes.kv_heads * rank * costs[0]
    rank_of_values = min(sizes.d_value, left // sizes.kv_heads // costs[1])
    for head in range(sizes.kv_heads):
        queries = [_columns(n, sizes.d_head) for n in range(head * n_shared, (head + 1) * n_shared)]
        keys, values = _columns(head, sizes.d_head), _columns(head, sizes.d_value)
        moments = sum(of_q[own, own] for own in queries), of_k[keys, keys]
        if a3 and not model.rotary:
            to, back = query_key_basis(*moments, rank)
        else:
            to = back = np.eye(sizes.d_head)[:, largest_products(*moments, rank, rotary=model.rotary)]
        for columns in queries:
            weights[q][:, columns] = stored(weights[q][:, columns] @ to, bits) @ back.T
        weights[k][:, keys] = stored(weights[k][:, keys] @ back, bits) @ to.T
        rows = [_columns(n, sizes.d_value) for n in range(head * n_shared, (head + 1) * n_shared)]
        outputs = np.concatenate([weights[o][own] for own in rows], axis=1)  # of all heads that share these values
        averaged = sum(model.parts[o].reads[own, own] for own in rows)
        to, back = value_basis(outputs, averaged if a3 else of_v[values, values], rank_of_values)
        weights[v][:, values] = stored(weights[v][:, values] @ to, bits) @ back
        outputs = to @ stored((back @ outputs).T, bits).T
        for own, columns in zip(rows, np.split(outputs, n_shared, axis=1), strict=True):
            weights[o][own] = columns
    return [rank, rank_of_values], sizes.kv_heads * (rank * costs[0] + rank_of_values * costs[1])


def _fewer_units(
    model: Parts, own: Sequence[int], weights: list[Array], share: float, bits: int, *, a3: bool
) -> tuple[int, int]:
    """Remove units of an MLP in place; return how many stay, and all bits."""
    *inputs, down = own
    moments, outputs = model.parts[down].reads, weights[down]
    cost = sum(len(weights[k]) for k in inputs) + outputs.shape[1]
    n_numbers, cost = cost * len(outputs), cost * bits + (0 if bits == 16 else SCALE_BITS * len(own))
    rank = min(len(outputs), int(share * n_numbers) // cost)
    if a3:
        kept = largest_units(outputs, moments, rank)
        new = outputs[kept]
    else:
        kept, new = nystroem(outputs, moments, rank)
    for k in inputs:
        weights[k] = stored(weights[k], bits)  # those of other units do not matter, their outputs are 0
    weights[down] = np.zeros_like(outputs)
    weights[down][kept] = stored(new.T, bits).T
    return rank, rank * cost


def _columns(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


def largest_grid(shapes: Sequence[tuple[int, ...]], budget: int, *, symmetric: bool = False) -> Grid | None:
    """Return the grid with most bits within a budget."""
    grids = [Grid(bits, group, symmetric) for bits, group in GRIDS]
    counts = [sum(grid.count(shape) for shape in shapes) for grid in grids]
    within = [k for k, count in enumerate(counts) if count <= budget]
    return grids[max(within, key=lambda k: counts[k])] if within else None


BASELINES: dict[str, Baseline] = {
    "nearest": rounding(lambda part, grid: round_to_nearest(part.weight, grid)),
    "nearest, symmetric": rounding(lambda part, grid: round_to_nearest(part.weight, grid), symmetric=True),
    "gptq": rounding(lambda part, grid: gptq(part.weight, part.reads, grid)),
    "gptq, activation order": rounding(lambda part, grid: gptq(part.weight, part.reads, grid, activation_order=True)),
    "gptq, symmetric": rounding(lambda part, grid: gptq(part.weight, part.reads, grid), symmetric=True),
    "awq": scaled,
    "svd-llm": truncation(lambda part: part.whitened, 16, of_model=False),
    "svd-llm, int8": truncation(lambda part: part.whitened, 8, of_model=False),
    "two-sided": truncation(lambda part: part.two_sided, 16, of_model=True),
    "two-sided, int8": truncation(lambda part: part.two_sided, 8, of_model=True),
    "modegpt": blocks(16, a3=False),
    "modegpt, int8": blocks(8, a3=False),
    "a3": blocks(16, a3=True),
    "a3, int8": blocks(8, a3=True),
}
TNLIB = "quantized"  # the method of tnlib that `compress --bits` selects
METHODS = (*BASELINES, TNLIB)
NO_TEXT = ("nearest", "nearest, symmetric")


@dataclass(frozen=True, repr=False)
class Remembering(RunningModel):
    """A running model that keeps its batches and outputs, because every row is compared with them."""

    kept_batches: dict[str, list[Batch]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    def batches(self, text: str) -> list[Batch]:
        """Return the batches of a text."""
        if text not in self.kept_batches:
            self.kept_batches[text] = super().batches(text)
        return self.kept_batches[text]

    def __call__(self, batch: Batch) -> Tensor:
        """Return the outputs for a batch of `batches`."""
        if id(batch) not in self.outputs:
            self.outputs[id(batch)] = super().__call__(batch)
        output: Tensor = self.outputs[id(batch)]
        return output


class Subject:
    """A model whose weights are replaced in memory, and compared with the original."""

    def __init__(self, source: Path, what: str, tests: Sequence[str]) -> None:
        self.source, self.what, self.tests = source, what, tests
        self.checkpoint = open_checkpoint(source)
        self._original, self._changed = open_running(source), open_running(source)
        self._reference = Remembering(**{one.name: getattr(self._original, one.name) for one in fields(RunningModel)})
        self._names = names_of(self.checkpoint, what, with_text=True)
        tensors, wiring = self.checkpoint.folder.tensors, self.checkpoint.wiring
        linears = [
            linear for k in wiring.projection_layers(what) for linear in wiring.layers[k].attention.projections.values()
        ]
        linears += [wiring.matrices[name] for name in self._names]
        biases = [tensors[linear.bias] for linear in linears if linear.bias in tensors]
        self.bias_bits = 8 * sum(info.end - info.begin for info in biases)
        self.n_before = sum(tensors[linear.weight].size for linear in linears) + sum(info.size for info in biases)

    def parts(self, text: str) -> Parts:
        """Return the weights with the statistics of a calibration text."""
        model = self._original
        batches = sample_batches(model.batches(text), _TOKENS)
        places = find_places(model, self._names)
        statistics = collect(model, places, batches, Statistics())
        sums: dict[str, Array] = {}
        for batch in batches:
            for key, x in read(model, batch, places).items():
                if x.ndim == 3:  # token ids of tables have two axes
                    sums[key] = sums.get(key, 0) + x.abs().sum((0, 1)).double().numpy()
        n_tokens = sum(batch.n_tokens for batch in batches)
        reads = {key: moments / n_tokens for key, moments in statistics.reads.items()}
        slopes = {key: moments / n_tokens for key, moments in statistics.slopes.items()}
        magnitudes = {key: total / n_tokens for key, total in sums.items()}
        parts, model_type = [], self.checkpoint.wiring.model_type
        for k in range(self.checkpoint.n_layers):
            projections = self.checkpoint.projections(k)
            biases = projections.biases
            for name in NAMES:
                weight = projections.weights[name]
                key, of = f"{k}.{name}", f"{k}.{'y' if name == 'o' else 'x'}"
                n = len(weight)  # the last input of x is 1, for the bias
                folded = of.partition(".")[2] in FOLDED[model_type]
                own = reads[of][:n, :n], magnitudes[of][:n], slopes[key]
                with_bias = np.vstack([weight, biases.get(name, np.zeros(weight.shape[1]))])
                outputs = None if name == "o" else with_bias.T @ reads[of] @ with_bias
                parts.append(Part(key, weight.astype(np.float64), *own, folded, outputs=outputs, layer=k))
        parts += [self._part(name, reads, magnitudes, slopes) for name in self._names]
        return Parts(parts, self.checkpoint.sizes, has_rotary_or_norms(self.checkpoint))

    def _part(self, name: str, reads: dict[str, Array], magnitudes: dict[str, Array], slopes: dict[str, Array]) -> Part:
        """Return a weight outside the attention."""
        wiring, weight = self.checkpoint.wiring, read_weight(self.checkpoint, name)[0].astype(np.float64)
        if wiring.is_unembedding(name):
            uses = [(slopes[name], reads[name])]
            return Part(name, weight, reads[name], magnitudes[name], None, factors=lambda: _of_table(weight.T, uses))
        if not wiring.is_embedding(name):
            folded = name.rpartition(".")[2] in FOLDED[wiring.model_type]
            k = next(k for k, one in enumerate(wiring.layers) if name in [m.name for m in one.feed_forward_matrices])
            return Part(name, weight, reads[name], magnitudes[name], slopes[name], folded, layer=k)
        tied, width = wiring.tied_key, weight.shape[1]
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
            own = self._module(part.key).get_parameter("weight")
            # transformers holds linear layers and tables as (out, in)
            with torch.no_grad():
                own.copy_(torch.from_numpy(weight.T))
        return [evaluate_running(self._reference, self._changed, test).measures() for test in self.tests]

    def _module(self, key: str) -> nn.Module:
        layer, _, name = key.partition(".")
        if name in NAMES and layer.isdigit():
            return self._changed.layers[int(layer)].projections[name].module
        return find_matrix(self._changed, key)


def _of_table(table: Array, uses: Sequence[tuple[Array, Array]]) -> Components:
    """Return the components (width, vocab) of a table (vocab, width); losses in the unit of `two_sided`."""
    found = table_components(table, uses)
    return Components(found.right.T, found.left.T, found.losses * sum(np.vdot(*use) for use in uses))


def compressed(source: Path, what: str, budget: float, text: str, tests: Sequence[str]) -> Measurement:
    """Return what `compress --bits` does, as a user calls it."""
    import tnlib_adapters

    with tempfile.TemporaryDirectory() as scratch:
        out, files = Path(scratch) / "out", [Path(scratch) / f"text{k}" for k in range(1 + len(tests))]
        for file, words in zip(files, (text, *tests), strict=True):
            file.write_text(words, encoding="utf-8")
        start = time.process_time()
        report = tnlib_adapters.compress(source, out, method=TNLIB, bits=budget, what=what, calibrate=files[0])
        spent = time.process_time() - start
        bits = 8 * report.compressed(report.bytes_after) / report.n_before
        return "", bits, [tnlib_adapters.evaluate(source, out, file).measures() for file in files[1:]], spent


def measurements(
    subject: Subject, text: str, methods: Sequence[str], budgets: Sequence[float]
) -> Iterator[tuple[str, float, Measurement]]:
    """Yield method, budget and measurement on one calibration text; seconds are those of statistics and method."""
    start = time.process_time()
    model = subject.parts(text) if {*methods} - {TNLIB} else None
    of_statistics = time.process_time() - start
    for method in methods:
        known: dict[str, list[calibrated.Measured]] = {}  # several budgets may have one setting
        for budget in budgets:
            if method == TNLIB:
                yield method, budget, compressed(subject.source, subject.what, budget, text, subject.tests)
                continue
            start = time.process_time()
            result = BASELINES[method](model, int(budget * subject.n_before) - subject.bias_bits)
            spent = time.process_time() - start + (0 if method in NO_TEXT else of_statistics)
            if result is None:
                continue
            setting, weights, n_bits = result
            bits = (n_bits + subject.bias_bits) / subject.n_before
            if (key := f"{setting} {bits}") not in known:
                known[key] = subject.compare(model.parts, weights)
            yield method, budget, (setting, bits, known[key], spent)


def row_of(method: str, budget: float, text: str, seed: int, found: Measurement) -> dict[str, str]:
    """Return the cells of a row by column."""
    setting, bits, measured, spent = found
    cells = {"method": method, "setting": setting, "budget": f"{budget:g}", "bits": f"{bits:.3f}", "text": text}
    measures = {
        f"{kind}: {name}": f"{value:.4f}"
        for kind, one in zip(calibrated.TEST_KINDS, measured, strict=True)
        for name, value in one.items()
    }
    return cells | {"seed": str(seed)} | measures | {"CPU s": f"{spent:.0f}"}


def ranges(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return for every method and budget the range over texts and seeds of all that was measured."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["budget"]), []).append(row)
    summaries = []
    for own in groups.values():
        if len(own) > 1:
            names = [name for name in own[0] if ": " in name]
            values = calibrated.range_of([[float(row[name]) for row in own] for name in names])
            seconds = [float(row["CPU s"]) for row in own]
            summary = own[0] | dict(zip(names, values, strict=True))
            summary |= {"setting": "", "text": f"{RANGE} {len(own)} texts", "seed": ""}
            summaries.append(summary | {"CPU s": f"{min(seconds):.0f} to {max(seconds):.0f}"})
    return summaries


def merged(old: Sequence[str], new: Sequence[dict[str, str]]) -> list[str]:
    """Return the lines of a table with new rows added, or in the place of those with the same `KEY`."""
    columns = list(new[0])
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in old)
    table = {}
    for row in [*(dict(zip(head, row, strict=True)) for row in rows[1:] if head == columns), *new]:
        table[tuple(row[name] for name in KEY)] = row

    def place(row: dict[str, str]) -> tuple[int, bool, str, str, float]:
        in_range = row["text"].startswith(RANGE)
        return METHODS.index(row["method"]), in_range, row["text"], row["seed"], -float(row["budget"])

    return table_of(sorted(table.values(), key=place))


def table_of(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the lines of a table."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    head, *lines = [f"| {' | '.join(one)} |" for one in cells]
    return [head, "|---" * len(rows[0]) + "|", *lines]


def table_under(heading: str) -> list[str]:
    """Return the lines of the table under a heading of the study."""
    lines = calibrated.STUDY.read_text(encoding="utf-8").splitlines()
    below = itertools.dropwhile(lambda line: not line.startswith("| method |"), lines[lines.index(heading) :])
    return list(itertools.takewhile(lambda line: line.startswith("|"), below))


@click.command()
@click.option("--model", type=click.Choice(calibrated.MODELS), default="minilm")
@click.option("--what", "whats", type=click.Choice(WHAT), multiple=True, default=("attention",))
@click.option("--bits", "budgets", type=float, multiple=True, default=(4.5, 4.0, 3.5, 3.0, 2.5, 2.0))
@click.option("--method", "methods", type=click.Choice(METHODS), multiple=True, default=METHODS)
@click.option("--text", "texts", type=click.Choice(tuple(calibrated.TEXTS)), multiple=True, default=("both",))
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), help="Which sentences are calibrated on.")
@click.option("--range", "ranged", is_flag=True, help="Calibrate on every text, and add the range over the texts.")
@click.option("--write", is_flag=True, help="Merge the rows into docs/study.md.")
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
    if write and any((model, what) not in HEADINGS for what in whats):
        raise click.UsageError("--write is for the attention of both models, and for all of llama.")
    tests = ["\n".join(sentences(kind, calibrated.TESTED)) for kind in calibrated.TEST_KINDS]
    for what in whats:
        subject, rows = Subject(calibrated.folder_of(model), what, tests), list[dict[str, str]]()
        for first, (text, seed) in enumerate(itertools.product(tuple(calibrated.TEXTS) if ranged else texts, seeds)):
            own = [method for method in methods if first == 0 or method not in NO_TEXT]
            words = calibrated.calibration_text(text, seed)
            for method, budget, found in measurements(subject, words, own, budgets):
                rows.append(row_of(method, budget, text, seed, found))
                print("\n".join(table_of(rows) if len(rows) == 1 else table_of(rows[-1:])[-1:]), flush=True)
        if ranged:
            rows += (summaries := ranges(rows))
            print("\n".join(table_of(summaries)[2:]))
        if write:
            calibrated.write_table(HEADINGS[model, what], merged(table_under(HEADINGS[model, what]), rows))


if __name__ == "__main__":
    main()
