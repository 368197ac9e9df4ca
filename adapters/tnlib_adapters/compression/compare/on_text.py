"""Compare methods at several sizes by their error on held-out text, in numbers and in bytes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.whitening import inputs_of_text
from tnlib_adapters.compression.compare.trials import Candidate, Table, Trial, grouped, run_trials, write_rows
from tnlib_adapters.compression.evaluation.baselines import gptq_bytes, gptq_model, plain_bytes, round_weights
from tnlib_adapters.compression.evaluation.evaluate import Evaluation, Reference
from tnlib_adapters.compression.methods.factorisation import Factorisation, measure_of_text
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.methods.table import TABLE, WITH_TEXT, resolve
from tnlib_adapters.compression.planner import factorise, round_plan
from tnlib_adapters.compression.report.report import GPTQ, INT8
from tnlib_adapters.compression.request import (
    Progress,
    check_attention,
    check_bits,
    check_keep,
    check_reads_text,
    check_runs,
    check_uncompressed,
    quiet,
)
from tnlib_adapters.compression.sizes import plan_bytes, stored_bytes
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import hold_out
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import put_together

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.stored_weights import Group

Matrices = Mapping[str, Sequence[FactoredMatrix]]
ROUNDED = (INT8, GPTQ)  # baselines, all weights rounded
DEFAULT_BITS = (4.0, 3.0)


@dataclass(frozen=True)
class TextRow:
    """One method at one size, measured on held-out text.

    `error` is 1 - the mean cosine similarity, or the divergence in nats per token; `worst` is the largest error of a
    single text, for embedding models. Bytes are of the attention alone, with factors in the dtype of the weights and in
    int8; None in int8 for weights that are rounded already. `keep` is 1 for these.
    """

    method: str
    keep: float
    kept: float
    n_bytes: int
    error: float
    worst: float | None
    n_bytes_int8: int | None
    error_int8: float | None
    seconds: float


@dataclass(frozen=True)
class Bench:
    """The source of a comparison, and its outputs on the held-out text that all models are compared with."""

    source: SourceModel
    reference: Reference

    @property
    def checkpoint(self) -> Checkpoint:
        """The source on disk."""
        return self.source.checkpoint

    @property
    def bytes_before(self) -> int:
        """Bytes of the attention in the original."""
        return stored_bytes(self.checkpoint)[0]["attention"]

    def baselines(self, moments: Mapping[str, Array]) -> list[TextRow]:
        """Return the rows of plain int8 and of GPTQ with these moments of the inputs."""
        models: dict[str, tuple[Callable[[], RunningModel], int]] = {
            INT8: (lambda: round_weights(self.source.original), plain_bytes(self.checkpoint)),
            GPTQ: (lambda: gptq_model(self.source, moments), gptq_bytes(self.checkpoint)),
        }
        rows = []
        for name, (make, size) in models.items():
            started = time.perf_counter()
            evaluation = self.reference.compare(make())
            seconds = time.perf_counter() - started
            rows.append(TextRow(name, 1.0, 1.0, size, evaluation.error, _worst(evaluation), None, None, seconds))
        return rows

    def measure(self, trial: Trial, factorising: float) -> TextRow:
        """Return the row of a trial, with factors as stored and in int8; `factorising` is its share of seconds."""
        plan, in_bits = trial.plan, trial.plan.forecast.in_bits
        evaluation = self._run(plan.matrices)
        n_bytes_int8 = error_int8 = None
        if not in_bits:
            in_int8 = round_plan(plan, self.checkpoint.wiring, 8)
            n_bytes_int8 = plan_bytes(self.checkpoint, in_int8)
            error_int8 = self._run(in_int8.matrices).error
        return TextRow(
            method=trial.name,
            keep=1.0 if in_bits else trial.size,
            kept=plan.kept,
            n_bytes=plan_bytes(self.checkpoint, plan),
            error=evaluation.error,
            worst=_worst(evaluation),
            n_bytes_int8=n_bytes_int8,
            error_int8=error_int8,
            seconds=factorising + trial.planning,
        )

    def _run(self, matrices: Matrices) -> Evaluation:
        import torch

        original, checkpoint = self.source.original, self.checkpoint

        def change(group: int, values: Group) -> Group:
            if not 0 <= group < checkpoint.n_layers:
                return values
            compressed = expand(matrices[checkpoint.wiring.attention_modules[group]], checkpoint.sizes)
            projections = checkpoint.projections(group).updated(compressed)
            tensors = put_together(original.wiring.layers[group].attention, projections)
            return values | {name: torch.from_numpy(a.astype(np.float32)) for name, a in tensors.items()}

        return self.reference.compare(original.changed(change))


def _worst(evaluation: Evaluation) -> float | None:
    return None if evaluation.cosine is None else 1 - float(evaluation.cosine.min())


def comparison_rows() -> dict[str, str]:
    """Return the name of every row of a comparison with the method that it measures."""
    both = [name for name, method in WITH_TEXT.items() if method.calibration != "required"]
    rows = {name: method for method in both for name in (method, f"{method}, whitened")}
    return rows | {name: name for name in WITH_TEXT if name not in both}


@dataclass(frozen=True)
class TextComparison:
    """Rows of a comparison, their error measure, and reasons for missing rows."""

    measure: str
    rows: list[TextRow]
    refused: dict[str, str]
    bytes_before: int

    @property
    def rounded(self) -> list[TextRow]:
        """Rows of the baselines."""
        return [row for row in self.rows if row.method in ROUNDED]

    @property
    def by_method(self) -> dict[str, list[TextRow]]:
        """Rows of the methods, sorted by bytes."""
        names = dict.fromkeys(row.method for row in self.rows if row.method not in ROUNDED)
        return {
            name: sorted((row for row in self.rows if row.method == name), key=lambda row: row.n_bytes)
            for name in names
        }

    def write_csv(self, file: Path) -> None:
        """Write one line per row, with a header."""
        write_rows(file, TextRow, self.rows)

    def table(self) -> Table:
        """Return title, columns, and cells of all rows, grouped by method."""

        def cells(row: TextRow) -> list[str]:
            worst = "" if row.worst is None else f"{row.worst:.2g}"
            floats = (f"{row.n_bytes / 1e6:.2f}", f"{row.error:.4f}", worst)
            size_int8 = "" if row.n_bytes_int8 is None else f"{row.n_bytes_int8 / 1e6:.2f}"
            error_int8 = "" if row.error_int8 is None else f"{row.error_int8:.4f}"
            return [row.method, f"{row.kept:.4f}", *floats, size_int8, error_int8, f"{row.seconds:.1f}"]

        columns = ["method", "kept", "MB", "error", "worst", "MB in int8", "error in int8", "s"]
        title = f"{self.measure} on held-out text; MB of the attention"
        return title, columns, grouped(self.rows, lambda row: row.method, cells)


def compare_on_text(
    checkpoint: Checkpoint,
    keeps: Sequence[float],
    text: str,
    methods: Sequence[str] = (),
    progress: Progress = quiet,
    *,
    bits: Sequence[float] = DEFAULT_BITS,
    workspace: Workspace | None = None,
) -> TextComparison:
    """Measure methods that use calibration data at several sizes; a tenth of the text is held out.

    Sizes are fractions of the numbers, `keeps`, or averages of bits per number for "quantized". `workspace` has the
    memory and the temporary files of factors and moments; None for the default memory, without files.

    Raises
    ------
    ArgumentError
        If a fraction or a method is invalid, the text is too short, or the model cannot be calibrated.
    """
    for keep in keeps:
        check_keep("compare", keep)
    for average in bits:
        check_bits("compare", average)
    known = dict.fromkeys(comparison_rows().values())
    for method in methods:
        if method not in known:
            raise ArgumentError(
                f"compare: with calibrate, method must be one of {', '.join(known)}, got {method!r}; choose one of "
                "them, or leave calibrate out."
            )
    check_uncompressed("compare", checkpoint)
    check_attention("compare", checkpoint)
    check_reads_text("compare", checkpoint)
    for method in methods:  # raises for a requested method; others are skipped later
        check_runs("compare", checkpoint, method)
    calibration_text, held_out = hold_out(text)
    if not held_out:
        raise ArgumentError(
            "compare: the text of calibrate must have at least ten lines, because a tenth is held out; add text."
        )
    source = SourceModel(checkpoint, function="compare")
    bench, workspace = Bench(source, Reference(source.original, held_out)), workspace or Workspace()

    @functools.cache
    def moments() -> Mapping[str, Array]:
        return inputs_of_text(checkpoint, calibration_text, progress, source=source, workspace=workspace)

    def make(name: str, method: str, report: Progress) -> Factorisation:
        row = TABLE[method]
        if row.unit == "model":
            factorisation: Factorisation = resolve(row.factorise)(
                checkpoint, calibration_text, report, source=source, workspace=workspace
            )
            return replace(factorisation, workspace=workspace)
        inputs = None if name == method else moments()
        return factorise(checkpoint, method, report, inputs=inputs, workspace=workspace)

    candidates = [
        Candidate(name, method, functools.partial(make, name, method), bits if TABLE[method].in_bits else keeps)
        for name, method in comparison_rows().items()
        if not methods or method in methods
    ]
    share = {candidate.name: 1 / max(1, len(candidate.sizes)) for candidate in candidates}
    rows, refused = run_trials(
        checkpoint, candidates, lambda trial: [bench.measure(trial, trial.factorising * share[trial.name])], progress
    )
    return TextComparison(measure_of_text(checkpoint), bench.baselines(moments()) + rows, refused, bench.bytes_before)
