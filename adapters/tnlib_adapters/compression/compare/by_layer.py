"""Compare methods at several fractions by operator errors, layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tnlib import ArgumentError
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_attention
from tnlib_adapters.compression.compare.trials import Candidate, Table, Trial, grouped, run_trials, write_rows
from tnlib_adapters.compression.evaluation.operator_errors import compare_layer
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.methods.table import METHODS
from tnlib_adapters.compression.planner import factorise
from tnlib_adapters.compression.request import (
    Progress,
    check_attention,
    check_keep,
    check_method,
    check_runs,
    check_uncompressed,
    quiet,
)
from tnlib_adapters.compression.sizes import count_attention
from tnlib_adapters.factors.expansion import expand


@dataclass(frozen=True)
class Row:
    """One method at one fraction on one layer.

    Errors are relative Frobenius errors over the operators of all heads, biases included. `seconds` is the time of the
    factorisation plus that of the rank selection at this fraction, divided by the number of layers.
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
    """Rows of a comparison, and reasons for missing rows."""

    rows: list[Row]
    refused: dict[str, str]

    def write_csv(self, file: Path) -> None:
        """Write one line per row, with a header."""
        write_rows(file, Row, self.rows)

    def table(self) -> Table:
        """Return title, columns, and cells of all rows, grouped by method and fraction."""

        def cells(row: Row) -> list[str]:
            errors = (f"{row.qk_error:.4f}", f"{row.ov_error:.4f}")
            return [row.method, f"{row.keep:g}", str(row.layer), *errors, f"{row.n_after:,}", f"{row.seconds:.2f}"]

        columns = ["method", "keep", "layer", "QK error", "OV error", "numbers", "seconds"]
        groups = grouped(self.rows, lambda row: (row.method, row.keep), cells)
        return "Relative error of the operators", columns, groups


def compare(
    checkpoint: Checkpoint,
    keeps: Sequence[float],
    methods: Sequence[str] = (),
    progress: Progress = quiet,
    *,
    workspace: Workspace | None = None,
) -> Comparison:
    """Measure methods (default: all) at several fractions of the attention parameters.

    Factors are measured before they are rounded to the dtype of a file. `workspace` has their memory and temporary
    files; None for the default memory, without files.

    Raises
    ------
    ArgumentError
        If a fraction or a method is invalid, or no method can run on this model at any of the fractions.
    """
    if not keeps:
        raise ArgumentError("compare: keeps must hold at least one fraction, got none; pass for example [0.5].")
    for keep in keeps:
        check_keep("compare", keep)
    for method in methods:
        check_method("compare", method)
    check_uncompressed("compare", checkpoint)
    check_attention("compare", checkpoint)
    for method in methods:
        check_runs("compare", checkpoint, method)
    candidates = [
        Candidate(name, name, functools.partial(factorise, checkpoint, name, workspace=workspace), keeps)
        for name in methods or METHODS
    ]
    rows, refused = run_trials(checkpoint, candidates, functools.partial(_measure, checkpoint), progress)
    if not rows:
        reasons = "; ".join(f"{trial}: {reason.rstrip('.')}" for trial, reason in refused.items())
        raise ArgumentError(f"compare: keeps must be met by at least one method, got {list(keeps)}; {reasons}.")
    return Comparison(rows, refused)


def _measure(checkpoint: Checkpoint, trial: Trial) -> list[Row]:
    """Return one row per layer."""
    seconds = (trial.factorising + trial.planning) / checkpoint.n_layers
    rows, numbers = [], count_attention(checkpoint)
    for layer, module in enumerate(checkpoint.wiring.attention_modules):
        before = checkpoint.projections(layer)
        after = before.updated(expand(trial.plan.matrices[module], checkpoint.sizes))
        original, compressed = (
            as_attention(projections, checkpoint.sizes, scale=1.0) for projections in (before, after)
        )  # operators exclude the score scale
        _, qk, ov = compare_layer(layer, original, compressed)
        n_after = trial.plan.numbers[module]
        rows.append(Row(trial.name, trial.size, layer, qk, ov, numbers[layer], n_after, seconds))
    return rows
