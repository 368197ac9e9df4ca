"""Compare methods at several fractions by their error on held-out text, in numbers and in bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.calibrate import factorise_calibrated
from tnlib_adapters.compression.calibration.text import hold_out
from tnlib_adapters.compression.calibration.whitening import factorise_whitened, inputs_of_text
from tnlib_adapters.compression.choices import WHITENED
from tnlib_adapters.compression.compare.rows import Table, grouped, write_rows
from tnlib_adapters.compression.compare.trials import Candidate, try_all
from tnlib_adapters.compression.evaluation.error_measures import measure_of_text
from tnlib_adapters.compression.evaluation.trial_run import Bench, TextRow
from tnlib_adapters.compression.methods.factorisation import Factorisation
from tnlib_adapters.compression.methods.uncalibrated import factorise
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import check_keep, check_reads_text, check_runs, check_uncompressed

# each row's name -> the method whose name selects it
ROWS = {
    **{name: method for method in WHITENED for name in (method, f"{method}, whitened")},
    "calibrated": "calibrated",
}
# plain rounding of all weights, the baseline of every method: name -> bits
ROUNDED = {"rounded to 8 bits": 8, "rounded to 4 bits": 4}


@dataclass(frozen=True)
class TextComparison:
    """Rows of a comparison, their error measure, and reasons for missing rows."""

    measure: str
    rows: list[TextRow]
    refused: dict[str, str]
    bytes_before: int

    @property
    def rounded(self) -> list[TextRow]:
        """The rows of plain rounding."""
        return [row for row in self.rows if row.method in ROUNDED]

    @property
    def by_method(self) -> dict[str, list[TextRow]]:
        """The other rows by method, sorted by numbers kept."""
        names = dict.fromkeys(row.method for row in self.rows if row.method not in ROUNDED)
        return {
            name: sorted((row for row in self.rows if row.method == name), key=lambda row: row.kept) for name in names
        }

    def write_csv(self, file: Path) -> None:
        """Write one line per row, with a header."""
        write_rows(file, TextRow, self.rows)

    def table(self) -> Table:
        """Return title, columns, and cells of all rows, grouped by method."""

        def cells(row: TextRow) -> list[str]:
            worst = "" if row.worst is None else f"{row.worst:.2g}"
            floats = (f"{row.n_bytes / 1e6:.2f}", f"{row.error:.4f}", worst)
            int8 = (f"{row.n_bytes_int8 / 1e6:.2f}", f"{row.error_int8:.4f}", f"{row.seconds:.1f}")
            return [row.method, f"{row.kept:.4f}", *floats, *int8]

        columns = ["method", "kept", "MB", "error", "worst", "MB in int8", "error in int8", "s"]
        title = f"{self.measure} on held-out text; MB of the attention"
        return title, columns, grouped(self.rows, lambda row: row.method, cells)


def compare_on_text(
    checkpoint: Checkpoint,
    keeps: Sequence[float],
    text: str,
    methods: Sequence[str] = (),
    progress: Progress = quiet,
) -> TextComparison:
    """Measure the methods of `ROWS`, or some of them, at several fractions; a tenth of the text is held out.

    Raises
    ------
    ArgumentError
        If a fraction or a method is invalid, the text is too short, or the model cannot be calibrated.
    """
    from tnlib_adapters.instrument.running_model import open_running

    for keep in keeps:
        check_keep("compare", keep)
    for method in methods:
        if method not in ROWS.values():
            raise ArgumentError(
                f"compare: with calibrate, method must be one of {', '.join(dict.fromkeys(ROWS.values()))}, got "
                f"{method!r}; choose one of them, or leave calibrate out."
            )
    check_uncompressed("compare", checkpoint)
    check_reads_text("compare", checkpoint)
    for method in methods:  # raises for a requested method; others are skipped later
        check_runs("compare", checkpoint, method)
    calibration_text, held_out = hold_out(text)
    if not held_out:
        raise ArgumentError(
            "compare: the text of calibrate must have at least ten lines, because a tenth is held out; add text."
        )
    folder = checkpoint.folder.path
    bench = Bench(checkpoint, open_running(folder), open_running(folder), held_out)
    candidates = [
        candidate
        for candidate in _candidates(checkpoint, calibration_text, progress)
        if not methods or candidate.method in methods
    ]
    rows, refused = try_all(
        checkpoint, candidates, keeps, lambda tried: [bench.measure(tried, tried.factorising / len(keeps))], progress
    )
    rounded = [bench.rounded(name, bits) for name, bits in ROUNDED.items()]
    return TextComparison(measure_of_text(checkpoint), rounded + rows, refused, bench.bytes_before)


def _candidates(checkpoint: Checkpoint, text: str, progress: Progress) -> Iterator[Candidate]:
    """Yield the candidate of every row."""

    @functools.cache
    def inputs() -> dict[str, Array]:
        return inputs_of_text(checkpoint, text, progress)

    def make(name: str, method: str, report: Progress) -> Factorisation:
        if method == "calibrated":
            return factorise_calibrated(checkpoint, text, report)
        if name == method:
            return factorise(checkpoint, method, report)
        return factorise_whitened(checkpoint, method, inputs(), report)

    for name, method in ROWS.items():
        yield Candidate(name, method, functools.partial(make, name, method))
