"""Methods side by side on the user's own text: what each costs there at several fractions, in numbers and in bytes."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.factored import Piece, expand
from tnlib_adapters.checkpoints.projections import module_names, put_together
from tnlib_adapters.checkpoints.tensor_file import STORED_AS
from tnlib_adapters.compression.calibration import calibrated_heads, factorisation_of, fitted
from tnlib_adapters.compression.evaluate import Evaluation, evaluate_running
from tnlib_adapters.compression.plain import plain_bytes, round_weights
from tnlib_adapters.compression.plan import (
    COSINE,
    DIVERGENCE,
    Factorisation,
    Progress,
    check_keep,
    check_uncompressed,
    factorise,
    quiet,
)
from tnlib_adapters.compression.text import hold_out
from tnlib_adapters.compression.whitening import factorise_whitened, inputs_of_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from tnlib_adapters.torch.hooks.running import RunningModel

# each row's name -> the method whose name selects it
ROWS = {
    "matrix": "matrix",
    "matrix, whitened": "matrix",
    "heads": "heads",
    "heads, whitened": "heads",
    "heads, calibrated": "heads",
}
# plain rounding of all weights, the rival of every method: name -> bits
ROUNDED = {"rounded to 8 bits": 8, "rounded to 4 bits": 4}

Pieces = Sequence[Sequence[Piece]]


@dataclass(frozen=True)
class TextRow:
    """One method at one fraction, measured on text that no method has seen.

    `error` is 1 - the mean cosine, or the divergence in nats a token; `worst` that of the worst text, where texts are
    embedded. Bytes are those of the attention alone, with factors in the dtype of the weights and in int8.
    """

    method: str
    keep: float
    kept: float
    n_bytes: int
    error: float
    worst: float | None
    n_bytes_int8: int
    error_int8: float
    seconds: float


@dataclass(frozen=True)
class TextComparison:
    """The rows, what their errors are, and why anything is missing."""

    measure: str
    rows: list[TextRow]
    refused: dict[str, str]
    bytes_before: int

    def write_csv(self, file: Path) -> None:
        """Write one line per row, with a header."""
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out)
            writer.writerow([field.name for field in fields(TextRow)])
            writer.writerows(astuple(row) for row in self.rows)


def compare_on_text(
    checkpoint: Checkpoint,
    keeps: Sequence[float],
    text: str,
    methods: Sequence[str] = (),
    progress: Progress = quiet,
) -> TextComparison:
    """Run the methods of `ROWS`, or those of some names, at several fractions; all but a tenth of the text is seen.

    Raises
    ------
    ArgumentError
        If a fraction or a method is off, the text is too short, or the model cannot be calibrated.
    """
    from tnlib_adapters.torch.hooks.running import open_running

    for keep in keeps:
        check_keep(keep)
    for method in methods:
        if method not in ROWS.values():
            raise ArgumentError(
                f"compare: with calibrate, method must be one of {', '.join(dict.fromkeys(ROWS.values()))}, got "
                f"{method!r}; choose one of them, or leave calibrate out."
            )
    check_uncompressed(checkpoint, by_text=True)
    seen, held = hold_out(text)
    if not held:
        raise ArgumentError(
            "compare: the text of calibrate must have at least ten lines, because a tenth is for measuring; add text."
        )
    folder = checkpoint.folder.path
    bench = _Bench(checkpoint, open_running(folder), open_running(folder), held)
    rows = [bench.rounded(name, bits) for name, bits in ROUNDED.items()]
    refused: dict[str, str] = {}
    for name, made in _factorisations(checkpoint, seen, progress):
        if methods and ROWS[name] not in methods:
            continue
        started = time.perf_counter()
        factorisation, fit = made()
        shared = time.perf_counter() - started
        for keep in keeps:
            started = time.perf_counter()
            try:
                choice = factorisation.choose(keep)
            except ArgumentError as problem:
                refused[f"{name} at {keep:g}"] = str(problem).removeprefix("compress: ")
                continue
            plan = factorisation.at(choice)
            pieces = plan.layers if fit is None else fit(choice)
            seconds = shared / len(keeps) + time.perf_counter() - started
            rows.append(bench.measure(name, keep, plan.kept, pieces, factorisation, seconds))
    measure = DIVERGENCE if bench.before.predicts else COSINE
    return TextComparison(measure, rows, refused, bench.bytes_before)


Fit = Callable[[Sequence[int]], Pieces]


def _factorisations(
    checkpoint: Checkpoint, text: str, progress: Progress
) -> Iterator[tuple[str, Callable[[], tuple[Factorisation, Fit | None]]]]:
    """Yield the name of every row, and what factorises by it, together with the fit that follows."""
    from tnlib_adapters.torch.hooks.running import open_running

    def whitened(method: str) -> tuple[Factorisation, Fit | None]:
        return factorise_whitened(checkpoint, method, inputs_of_text(checkpoint, text, progress), progress), None

    def calibrated() -> tuple[Factorisation, Fit]:
        model = open_running(checkpoint.folder.path)
        batches = model.batches(text)
        heads = calibrated_heads(checkpoint, model, batches, progress)

        def fit(choice: Sequence[int]) -> Pieces:
            fresh = open_running(checkpoint.folder.path)  # the fit leaves it truncated
            return list(fitted(fresh, heads, choice, batches, progress=progress))

        return factorisation_of(checkpoint, model, heads), fit

    yield "matrix", lambda: (factorise(checkpoint, "matrix", progress), None)
    yield "matrix, whitened", lambda: whitened("matrix")
    yield "heads", lambda: (factorise(checkpoint, "heads", progress), None)
    yield "heads, whitened", lambda: whitened("whitened")
    yield "heads, calibrated", calibrated


@dataclass(frozen=True)
class _Bench:
    """Two running models, one as it came and one to put factors into, and the text to compare them on."""

    checkpoint: Checkpoint
    before: RunningModel
    after: RunningModel
    text: str

    @property
    def _names(self) -> list[str]:
        checkpoint = self.checkpoint
        layers = range(checkpoint.n_layers)
        return [name for k in layers for name in module_names(checkpoint.architecture, checkpoint.prefix, k)]

    @property
    def bytes_before(self) -> int:
        """Bytes of the attention as it came."""
        tensors = self.checkpoint.folder.tensors
        stored = [tensors.get(f"{name}.{kind}") for name in self._names for kind in ("weight", "bias")]
        return sum(info.end - info.begin for info in stored if info is not None)

    def rounded(self, name: str, bits: int) -> TextRow:
        """Return the row of all weights rounded as they are, a scale for every output."""
        from tnlib_adapters.torch.hooks.running import open_running

        started = time.perf_counter()
        model = round_weights(open_running(self.checkpoint.folder.path), bits=bits)
        found, size = evaluate_running(self.before, model, self.text), plain_bytes(self.checkpoint, bits=bits)
        worst = None if found.cosine is None else 1 - float(found.cosine.min())
        return TextRow(name, 1.0, 1.0, size, found.error, worst, size, found.error, time.perf_counter() - started)

    def measure(
        self, name: str, keep: float, kept: float, pieces: Pieces, factorisation: Factorisation, seconds: float
    ) -> TextRow:
        """Return the row of these pieces, as they are and rounded."""
        tensors = self.checkpoint.folder.tensors
        width = STORED_AS[tensors[f"{self._names[0]}.weight"].dtype].itemsize
        fixed = width * sum(layer.fixed for layer in factorisation.layers)
        stored = [piece.parts(in_int8=True) for layer in pieces for piece in layer]
        found = self._run(pieces)
        rounded = self._run([[piece.rounded() for piece in layer] for layer in pieces])
        return TextRow(
            method=name,
            keep=keep,
            kept=kept,
            n_bytes=fixed + width * sum(a.size for layer in pieces for piece in layer for a in piece.arrays.values()),
            error=found.error,
            worst=None if found.cosine is None else 1 - float(found.cosine.min()),
            n_bytes_int8=fixed + sum(a.nbytes if own else width * a.size for one in stored for a, own in one.values()),
            error_int8=rounded.error,
            seconds=seconds,
        )

    def _run(self, pieces: Pieces) -> Evaluation:
        for layer, of_layer in enumerate(pieces):
            projections = self.checkpoint.projections(layer).updated(expand(of_layer, self.checkpoint.sizes))
            row = self.checkpoint.architecture
            base = row.attention.format(layer=layer)
            values = put_together(row, self.checkpoint.sizes, "", layer, projections)
            for part, held in row.projections.items():
                module = self.after.layers[layer].projections[held[0]].module
                for kind in ("weight", "bias"):
                    if f"{base}.{part}.{kind}" in values:
                        _copy(getattr(module, kind), values[f"{base}.{part}.{kind}"])
        return evaluate_running(self.before, self.after, self.text)


def _copy(parameter: Tensor, values: Array) -> None:
    import torch

    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values))


def draw_on_text(found: TextComparison) -> Figure:
    """Draw error against numbers kept, and against the bytes of the attention, factors as they are and in int8."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name in dict.fromkeys(row.method for row in found.rows if row.method not in ROUNDED):
        mine = sorted((row for row in found.rows if row.method == name), key=lambda row: row.kept)
        (line,) = axes[0].plot([row.kept for row in mine], [row.error for row in mine], "o-", ms=5, label=name)
        colour = line.get_color()
        axes[1].plot([row.n_bytes / 1e6 for row in mine], [row.error for row in mine], "o-", ms=5, color=colour)
        axes[1].plot([r.n_bytes_int8 / 1e6 for r in mine], [r.error_int8 for r in mine], "s--", ms=4, color=colour)
    for row, mark in zip((row for row in found.rows if row.method in ROUNDED), "*P", strict=True):
        axes[1].plot(row.n_bytes / 1e6, row.error, mark, ms=12, color="black", label=f"weights {row.method}")
    axes[1].plot([], [], "s--", ms=4, color="grey", label="the same factors in int8")
    axes[1].axvline(found.bytes_before / 1e6, color="grey", lw=1, label="as it is")
    axes[0].set(xlabel="numbers kept", ylabel=found.measure, yscale="log", xlim=(0, 1))
    axes[0].xaxis.set_major_formatter(PercentFormatter(1.0))
    axes[1].set(xlabel="MB of the attention", xlim=(0, None))
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=9)
    return figure
