"""Every method at several fractions, measured layer by layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from tnlib_adapters.compression.rows import Table, grouped, write_rows


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
        write_rows(file, Row, self.rows)

    def table(self) -> Table:
        """Return a title, the columns, and the cells of all rows, one group for a method at one fraction."""

        def cells(row: Row) -> list[str]:
            errors = (f"{row.qk_error:.4f}", f"{row.ov_error:.4f}")
            return [row.method, f"{row.keep:g}", str(row.layer), *errors, f"{row.n_after:,}", f"{row.seconds:.2f}"]

        columns = ["method", "keep", "layer", "QK error", "OV error", "numbers", "seconds"]
        groups = grouped(self.rows, lambda row: (row.method, row.keep), cells)
        return "Relative error of the operators", columns, groups


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
