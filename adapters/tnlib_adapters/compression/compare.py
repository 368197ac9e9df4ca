"""Every method at several fractions, measured layer by layer."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib import ArgumentError
from tnlib_adapters.attention.checkpoint import Checkpoint, as_attention
from tnlib_adapters.checkpoints.factored import expand
from tnlib_adapters.checkpoints.projections import Projections
from tnlib_adapters.compression.factorisation import Factorisation
from tnlib_adapters.compression.names import METHODS
from tnlib_adapters.compression.operator_errors import compare_layer
from tnlib_adapters.compression.plain import factorise
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import check_keep, check_method, check_runs, check_uncompressed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One method at one fraction on one layer.

    Errors are relative Frobenius errors of all heads' operators together, biases included. `seconds` is the time
    of the factorisation, shared out over layers, plus that of choosing the factors at this fraction.
    """

    method: str
    keep: float
    layer: int
    qk_error: float
    ov_error: float
    n_before: int
    n_after: int
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, and why anything is missing from it."""

    rows: list[Row]
    refused: dict[str, str]

    def write_csv(self, file: Path) -> None:
        """Write one line per row, with a header."""
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out)
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows(astuple(row) for row in self.rows)


def compare(
    checkpoint: Checkpoint, keeps: Sequence[float], methods: Sequence[str] = (), progress: Progress = quiet
) -> Comparison:
    """Run methods (all of them by default) at several fractions of the attention's numbers.

    Factors are measured as they are computed, before they are rounded to the dtype of a file.

    Raises
    ------
    ArgumentError
        If a fraction or a method is off, or no method can run on this model at any of the fractions.
    """
    if not keeps:
        raise ArgumentError("compare: keeps must hold at least one fraction, got none; pass for example [0.5].")
    for keep in keeps:
        check_keep("compare", keep)
    for method in methods:
        check_method("compare", method)
    check_uncompressed("compare", checkpoint)
    for method in methods:
        check_runs("compare", checkpoint, method)
    originals = [checkpoint.projections(layer) for layer in range(checkpoint.n_layers)]
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for method in methods or METHODS:
        try:
            started = time.perf_counter()
            found = factorise(checkpoint, method, _named(progress, method))
            shared = (time.perf_counter() - started) / checkpoint.n_layers
        except ArgumentError as problem:  # only where all methods are tried; one asked for by name was checked
            refused[method] = str(problem).removeprefix("compress: ")
            continue
        for keep in keeps:
            try:
                rows += _measure(checkpoint, originals, found, keep, shared, _named(progress, method))
            except ArgumentError as problem:
                refused[f"{method} at {keep:g}"] = str(problem).removeprefix("compress: ")
    if not rows:
        reasons = "; ".join(f"{what}: {reason.rstrip('.')}" for what, reason in refused.items())
        raise ArgumentError(f"compare: keeps must be met by at least one method, got {list(keeps)}; {reasons}.")
    return Comparison(rows, refused)


def _named(progress: Progress, method: str) -> Progress:
    return lambda stage, done, total: progress(f"{method}: {stage}", done, total)


def _measure(
    checkpoint: Checkpoint,
    originals: Sequence[Projections],
    found: Factorisation,
    keep: float,
    shared: float,
    progress: Progress,
) -> list[Row]:
    started = time.perf_counter()
    plan = found.plan(keep, progress)
    seconds = shared + (time.perf_counter() - started) / checkpoint.n_layers
    n_before = plan.n_before // checkpoint.n_layers
    rows = []
    for layer, (before, pieces, n_after) in enumerate(zip(originals, plan.layers, plan.layer_numbers, strict=True)):
        after = before.updated(expand(pieces, checkpoint.sizes))
        old, new = (
            as_attention(one, checkpoint.sizes, scale=1.0) for one in (before, after)
        )  # no operator has a scale
        _, qk, ov = compare_layer(layer, old, new)
        rows.append(Row(found.method, keep, layer, qk, ov, n_before, n_after, seconds))
    return rows


def draw(comparison: Comparison) -> Figure:
    """Draw error against numbers, a line per method through the mean over layers, and a dot per layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, name in zip(axes, ("qk_error", "ov_error"), strict=True):
        for method in dict.fromkeys(row.method for row in comparison.rows):
            mine = [row for row in comparison.rows if row.method == method]
            kept, mean = zip(*[_mean(mine, keep, name) for keep in sorted({row.keep for row in mine})], strict=True)
            (line,) = ax.plot(kept, mean, "o-", ms=5, label=method)
            each = [row.n_after / row.n_before for row in mine], [getattr(row, name) for row in mine]
            ax.plot(*each, ".", ms=4, alpha=0.35, color=line.get_color())
        ax.set(title=f"{name[:2].upper()} operators", xlabel="fraction of the numbers kept", ylim=(0, 1.05))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("relative error: mean, and each layer")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _mean(rows: Sequence[Row], keep: float, name: str) -> tuple[float, float]:
    """Return the fraction that all layers keep together, and the mean of their errors."""
    mine = [row for row in rows if row.keep == keep]
    kept = sum(row.n_after for row in mine) / sum(row.n_before for row in mine)
    return kept, sum(getattr(row, name) for row in mine) / len(mine)
