"""Files of a compression report: JSON, an HTML page with figures, a note in the model card."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib._html import table
from tnlib_adapters.compression.methods.factorisation import RELATIVE
from tnlib_adapters.compression.report import INT8, Report, headline, megabytes, size_text, summarise, verdict
from tnlib_adapters.compression.request import PAGE, REPORT
from tnlib_adapters.files.folder import NOTE, split_card
from tnlib_adapters.html_page import page, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PREDICTED, _MEASURED = "#3b6ea5", "#c8553d"  # colours of errors


def write_report(report: Report, out: Path) -> None:
    """Write tnlib_report.json, tnlib_report.html and a note in README.md into the folder `out`."""
    _write_note(out, report)
    (out / REPORT).write_text(report.to_json() + "\n", encoding="utf-8")
    write_page(report, out / PAGE)


def _write_note(out: Path, report: Report) -> None:
    """Put three lines on how the folder loads on top of its README.md, below the YAML front matter of a model card."""
    file = out / "README.md"
    if file.is_dir():
        return
    # IN may be an earlier result, of dense layout, with a note
    head, body = split_card(file.read_bytes() if file.exists() else b"")
    original = " The model card below is that of the original." if body.strip() else ""
    extra = "tnlib[torch]" if "transformers_plugin" in report.load else "tnlib"
    requirement = f"with `{extra}` installed" if "tnlib_adapters" in report.load else "without tnlib"
    note = (
        f"{NOTE}, with {size_text(report)}: see `{PAGE}`.{original}\n"
        f"> It loads {requirement}, from the path `folder`:\n"
        f"> `{report.load}`\n"
    )
    file.write_bytes(head + note.encode() + (b"\n" + body.lstrip(b"\r\n") if body.strip() else b""))


def write_page(report: Report, file: Path) -> None:
    """Write the page: summary, error against size, and bits of every weight."""
    name, conclusion = Path(report.source).resolve().name, verdict(report)
    body = [
        f"<h1>{html.escape(name)}, {html.escape(headline(report))}</h1>",
        f"<p>{html.escape(conclusion[0].upper() + conclusion[1:])}.</p>" if conclusion else "",
        f"<p>The {report.model_type} checkpoint {html.escape(report.source)} was compressed by method {report.method}, "
        f"{html.escape(size_text(report))}, and written in layout {report.layout}"
        f"{'' if report.store == 'float' else f', with factors in {report.store}'}. Its parameters are the entries of "
        "weights, biases and factors.</p>",
        f"<p>To load it, put its path in the place of <code>folder</code>: <code>{html.escape(report.load)}</code></p>",
        table(["", "before", "after"], summarise(report)),
        *_curve(report),
        *_rounded(report),
    ]
    file.write_text(page(name, body), encoding="utf-8")


def _rounded(report: Report) -> list[str]:
    """Return the table of the weights that are stored as integers, if there are any."""
    if not report.rounded:
        return []
    rows = [
        [
            f"{weight.module}, {weight.of}" if weight.of else weight.module,
            str(weight.bits),
            str(weight.rank or ""),
            str(weight.group or ""),
            f"{weight.n_bytes / 1e3:,.1f}",
        ]
        for weight in report.rounded
    ]
    return [
        "<h2>Bits of every weight</h2>",
        "<p>A weight without a rank is stored as one matrix of integers with scales. A weight with a rank is stored as "
        "two such factors of this rank. The group is the number of entries that share a scale. If the cell is empty, "
        "every column of the weight (in, out), every component of the factors, or every row of an embedding table has "
        "a scale."
        f"{' The files hold the products in floats.' if report.layout == 'dense' else ''}</p>",
        table(["weight", "bits", "rank", "group", report.rounded_bytes_label], rows),
    ]


def _curve(report: Report) -> list[str]:
    """Return the section on error against size, if the method predicts errors."""
    if not report.curve.get("predicted"):
        return []
    measure = (
        "the root mean square of the relative errors of the truncated operators and weights"
        if report.measure == RELATIVE
        else f"{report.measure} before any fit"
    )
    return [
        "<h2>Error against size</h2>",
        f"<p>The line is {html.escape(measure)}, as the method predicts it for every size from one factorisation. The "
        "other marks are the error measured on the written checkpoint, and rounding of the same weights, each at its "
        "bytes.</p>",
        svg(error_curve(report), "curve"),
    ]


def error_curve(report: Report) -> Figure:
    """Draw predicted error against bytes, the chosen and measured points, and plain int8.

    A second axis above is in fractions of the parameters or in bits per parameter.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    ax = figure.subplots()
    unit, n_bytes = _bytes_per_unit(report)
    sizes, errors = (np.array(report.curve.get(name, [])) for name in (unit, "predicted"))
    largest = errors.max(initial=0.0)
    plotted = errors > 1e-4 * largest  # the logarithmic axis ends four decades below the largest error
    ax.plot(n_bytes / 1e6 * sizes[plotted], errors[plotted], color=_PREDICTED, label="predicted")
    x = n_bytes / 1e6 * (report.kept if unit == "kept" else report.average_bits or 0.0)
    if report.predicted is not None:
        label = f"chosen: {report.predicted:.3g} predicted"
        ax.plot(x, report.predicted, "o", color=_PREDICTED, mfc="none", ms=11, mew=1.5, label=label)
    if report.measured is not None:
        ax.plot(x, report.measured, "D", color=_MEASURED, ms=5, label=f"measured: {report.measured:.3g}", zorder=3)
    if report.plain_measured is None:
        label = f"{INT8}: {megabytes(report.plain_bytes)}"
        ax.axvline(report.plain_bytes / 1e6, color="black", ls=":", lw=1, label=label)
    else:
        label = f"{INT8}, {megabytes(report.plain_bytes)}: {report.plain_measured:.2g} measured"
        point = report.plain_bytes / 1e6, report.plain_measured
        ax.plot(*point, "*", color="black", ms=10, label=label, clip_on=False)
    stored = ", in factors" if report.layout == "dense" else ""
    ax.set(xlabel=f"MB of the {report.subject}{stored}", ylabel=report.measure, xlim=(0, None))
    if report.measure == RELATIVE or not plotted.any():
        ax.set_ylim(0, None)
    else:
        ax.set_yscale("log")
    scale = n_bytes / 1e6
    above = ax.secondary_xaxis("top", functions=(lambda x: np.divide(x, scale), lambda size: np.multiply(size, scale)))
    if unit == "kept":
        above.xaxis.set_major_formatter(PercentFormatter(1.0))
    above.set_xlabel("parameters kept" if unit == "kept" else "bits per parameter")
    ax.grid(alpha=0.3)
    ax.spines["right"].set_visible(False)
    ax.legend(frameon=False)
    return figure


def _bytes_per_unit(report: Report) -> tuple[str, float]:
    """Return the unit of the curve, and the bytes for a size of 1 in the factored layout."""
    if "bits" in report.curve:
        return "bits", report.n_before / 8
    if report.layout == "dense":
        return "kept", float(report.compressed(report.bytes_before))
    return "kept", report.compressed(report.bytes_after) / report.kept
