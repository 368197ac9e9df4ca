"""Terminal output of reports and evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tnlib_adapters.compression.report import INT8, headline, part_sizes, size_text, summarise, verdict
from tnlib_adapters.compression.request import PAGE
from tnlib_adapters.files.folder import path_text

if TYPE_CHECKING:
    from tnlib_adapters.compression.evaluate import Evaluation
    from tnlib_adapters.compression.report import Report, RoundedReport


def show_report(report: Report, out: Path) -> None:
    """Print the size of all weights and the error, those of plain int8, the errors of every layer, and the summary."""
    click.echo(headline(report))
    if remark := verdict(report):
        click.echo(part_sizes(report))
        bits = f"{8 * report.plain_bytes / report.n_before:.2f} bits"
        click.echo(f"  {INT8}: {report.plain_bytes / 1e6:.2f} MB, {bits}; {report.plain_measured:.2g}")
        click.echo(f"{remark[0].upper()}{remark[1:]}.")
        click.echo()
    after = "in factors" if report.layout == "dense" else "after"
    counts = ("bits of q k v o", report.rounded_bytes_label) if report.is_rounded else ("parameters before", after)
    rows = [
        [str(layer.layer), *(f"{e:.4f}" for e in (layer.qk_error, layer.ov_error, layer.worst)), *cells]
        for layer, cells in zip(report.layers, _sizes_of_layers(report), strict=True)
    ]
    _print_table(
        f"{report.model_type}, method {report.method}: {size_text(report)}",
        ["layer", "QK error", "OV error", "worst head", *counts],
        [rows, [["all", "", "", "", *_total(report)]]],
    )
    lines = summarise(report)
    width = max(len(name) for name, _, _ in lines)
    for name, before, now in lines:
        click.echo(f"{name:<{width}}  {f'{before} -> {now}' if before and now else before or now}")
    code = report.load.replace("(folder)", f"({path_text(out)!r})")
    click.echo(f"written to {path_text(out)}, with {PAGE}; load it with:")
    click.echo("".join(f"\n    {statement}" for statement in code.split("; "))[1:])


def show_evaluation(evaluation: Evaluation) -> None:
    """Print the measures by name."""
    click.echo(f"{evaluation.n_texts:,} texts, {evaluation.n_tokens:,} tokens in total")
    for name, value in evaluation.measures().items():
        click.echo(f"{name}   {value:.4f}")
    if evaluation.tokens_per_second is not None:
        click.echo("tokens per second, forward pass   {:,.0f} -> {:,.0f}".format(*evaluation.tokens_per_second))


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


def _sizes_of_layers(report: Report) -> list[tuple[str, str]]:
    """Return two cells for every layer: parameters before and after, or the bits of the projections and their kB."""
    if not report.is_rounded:
        return [(f"{layer.n_before:,}", f"{layer.n_after:,}") for layer in report.layers]
    projections = [weight for weight in report.rounded if weight.of]
    layers = [list(layer) for _, layer in itertools.groupby(projections, key=lambda weight: weight.module)]
    if not layers:
        return [("", "")] * len(report.layers)
    return [(" ".join(map(_bits, layer)), _kb(layer)) for layer in layers]


def _bits(weight: RoundedReport) -> str:
    return str(weight.bits) if weight.rank is None else f"{weight.bits}(rank {weight.rank})"


def _total(report: Report) -> tuple[str, str]:
    if not report.is_rounded:
        return f"{report.n_before:,}", f"{report.n_after:,}"
    return f"{report.average_bits:.2f} on average", _kb(report.rounded)


def _kb(rounded: Sequence[RoundedReport]) -> str:
    return f"{sum(weight.n_bytes for weight in rounded) / 1e3:,.1f}"
