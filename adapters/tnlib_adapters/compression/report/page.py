"""HTML page of a compression report."""

from __future__ import annotations

import html
from pathlib import Path

from tnlib_adapters.compression.evaluation.error_measures import RELATIVE
from tnlib_adapters.compression.methods.int8_baseline import verdict
from tnlib_adapters.compression.report.html import page, svg, table
from tnlib_adapters.compression.report.pictures import error_curve, error_maps, spectra, where_it_went
from tnlib_adapters.compression.report.report import Report
from tnlib_adapters.compression.report.summary import summarise


def write_page(report: Report, file: Path) -> None:
    """Write the page: summary, sizes, errors per head and layer, and spectra."""
    name = Path(report.source).resolve().name
    body = [
        f"<h1>{html.escape(name)}, {report.kept:.1%} of its {report.subject} kept by method {report.method}</h1>",
        f"<p>A {report.model_type} checkpoint from {html.escape(report.source)}; layout {report.layout}"
        f"{', factors in int8' if report.store == 'int8' else ''}.</p>",
        table(["", "before", "after"], summarise(report)),
        *([f"<p>Beside rounding: {html.escape(comparison)}.</p>"] if (comparison := verdict(report)) else []),
        "<h2>Where the numbers and the bytes went</h2>",
        svg(where_it_went(report), "numbers"),
        *_curve(report),
        "<h2>Error of every head</h2>",
        "<p>Relative Frobenius error of each head's operators in homogeneous coordinates, biases included: "
        f"QK gives the scores, OV what is written to the residual stream.{_say_little(report)}</p>",
        svg(error_maps(report), "errors"),
        table(
            ["layer", "QK error", "OV error", "numbers before", "after"],
            [
                [
                    str(layer.layer),
                    f"{layer.qk_error:.4f}",
                    f"{layer.ov_error:.4f}",
                    f"{layer.n_before:,}",
                    f"{layer.n_after:,}",
                ]
                for layer in report.layers
            ],
        ),
        "<h2>Spectra</h2>",
        "<p>Singular values of the original operators, each divided by its largest. "
        "A head whose line falls early has a low effective rank.</p>",
        svg(spectra(report), "spectra"),
    ]
    file.write_text(page(name, body), encoding="utf-8")


def _curve(report: Report) -> list[str]:
    """Return the section on error against size, if the method predicts errors."""
    if not report.curve.get("kept"):
        return []
    measure = (
        "The root mean square of the relative errors of what is truncated"
        if report.measure == RELATIVE
        else f"{report.measure[0].upper()}{report.measure[1:]}, before any fit"
    )
    return [
        "<h2>Error against size</h2>",
        f"<p>{html.escape(measure)}, predicted by the method for every budget from one factorisation; the error "
        "measured on the written checkpoint; and plain int8 at the same number of bytes.</p>",
        svg(error_curve(report), "curve"),
    ]


def _say_little(report: Report) -> str:
    """Return a note on operator errors for a calibrated compression, else an empty string."""
    if report.measure == RELATIVE:
        return ""
    return " With calibration they are large: directions that the text does not use are removed, and count here."
