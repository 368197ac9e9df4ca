"""Terminal output of reports, evaluations and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tnlib_adapters.compression.report.report import summarise, verdict
from tnlib_adapters.compression.request import PAGE
from tnlib_adapters.files.folder import path_text

if TYPE_CHECKING:
    from tnlib_adapters.compression.compare.by_layer import Comparison
    from tnlib_adapters.compression.compare.on_text import TextComparison
    from tnlib_adapters.compression.evaluation.evaluate import Evaluation
    from tnlib_adapters.compression.report.report import LayerReport, Report


def show_report(report: Report, out: Path) -> None:
    """Print the errors of every layer, the summary, and the verdict."""
    subject = report.subject
    rows = [
        [str(layer.layer), *(f"{e:.4f}" for e in (layer.qk_error, layer.ov_error, layer.worst)), *_counts(layer)]
        for layer in report.layers
    ]
    after = "in factors" if report.layout == "dense" else "after"
    _print_table(
        f"{report.model_type}, method {report.method}: {report.kept:.4f} of the {_genitive(subject)} numbers kept",
        ["layer", "QK error", "OV error", "worst head", "numbers before", after],
        [rows, [["all", "", "", "", *_counts(report)]]],
    )
    lines = summarise(report)
    width = max(len(name) for name, _, _ in lines)
    for name, before, now in lines:
        click.echo(f"{name:<{width}}  {f'{before} -> {now}' if before and now else before or now}")
    if remark := verdict(report):
        click.echo(remark)
    code = report.load.replace("(folder)", f"({path_text(out)!r})")
    click.echo(f"written to {path_text(out)}, with {PAGE}; load it with: {code}")


def show_evaluation(evaluation: Evaluation) -> None:
    """Print the measures by name."""
    click.echo(f"{evaluation.n_texts:,} texts, {evaluation.n_tokens:,} tokens in total")
    for name, value in evaluation.measures().items():
        click.echo(f"{name}   {value:.4f}")


def show_comparison(comparison: Comparison | TextComparison, out: Path) -> None:
    """Print the rows, and the refused methods with reasons."""
    title, columns, groups = comparison.table()
    _print_table(title, columns, groups)
    for name, reason in comparison.refused.items():
        click.echo(f"without {name}: {reason}")
    click.echo(f"written to {path_text(out)}: compare.csv, compare.png")


def _print_table(title: str, columns: list[str], groups: list[list[list[str]]]) -> None:
    """Print rows in groups separated by lines, right-aligned; as lines "column: value" where the terminal is narrow."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    console = Console()
    words = zip(columns, *(row for group in groups for row in group), strict=True)
    widths = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in words]
    if sum(widths) + 3 * len(widths) + 1 > console.width:  # rich would cut words, at last to nothing
        click.echo(title)
        for row in (row for group in groups for row in group):
            click.echo()
            for name, cell in zip(columns, row, strict=True):
                if cell:
                    click.echo(f"{name}: {cell}")
        return
    table = Table(*columns)
    for column in table.columns:
        column.justify = "right"
    for group in groups:
        for row in group:
            table.add_row(*row)
        table.add_section()
    click.echo(title)
    console.print(table)


def _counts(report: Report | LayerReport) -> list[str]:
    return [f"{report.n_before:,}", f"{report.n_after:,}"]


def _genitive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"
