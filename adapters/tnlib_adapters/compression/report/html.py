"""Files of a compression report: JSON, an HTML page, a note in the model card; elements of self-contained pages."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib._html import table
from tnlib_adapters.compression.methods.factorisation import RELATIVE
from tnlib_adapters.compression.report.figures import error_curve, error_maps, size_bars, spectra
from tnlib_adapters.compression.report.report import INT8, Report, headline, size_text, summarise, verdict
from tnlib_adapters.compression.request import PAGE, REPORT
from tnlib_adapters.files.folder import NOTE, split_card

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { padding: .2rem .9rem .2rem 0; text-align: right }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 1px solid #999 }
svg { max-width: 100%; height: auto } p { max-width: 46rem }
"""


def page(title: str, body: Sequence[str], style: str = "") -> str:
    """Return an HTML page; `title` is escaped here, `body` must be escaped by the caller."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{html.escape(title)}</title><style>{_STYLE}{style}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def svg(figure: Figure, name: str) -> str:
    """Return a figure as an svg element whose ids start with `name`, which must be unique on the page."""
    import matplotlib as mpl

    out = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": "tnlib"}):  # reproducible ids
        figure.savefig(out, format="svg", metadata=no_metadata)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    referenced = set(re.findall(r'(?:href="|url\()#([^")]+)', text))  # equal images share an unused id
    text = re.sub(r' id="([^"]*)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in referenced else "", text)
    return re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)


def write_report(report: Report, out: Path) -> None:
    """Write tnlib_report.json, tnlib_report.html and a note in README.md into the folder `out`."""
    _write_note(out, report)
    report.write(out / REPORT)
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
    requirement = f"with `pip install '{extra}'`" if "tnlib_adapters" in report.load else "without tnlib"
    size = (
        f"rounded its {report.subject} to {report.average_bits:.2f} bits per parameter"
        if report.is_rounded
        else f"kept {report.kept:.4f} of the parameters of its {report.subject}"
    )
    note = (
        f"{NOTE}, which {size}: see `{PAGE}`.{original}\n"
        f"> It loads {requirement}, from the path `folder`:\n"
        f"> `{report.load}`\n"
    )
    file.write_bytes(head + note.encode() + (b"\n" + body.lstrip(b"\r\n") if body.strip() else b""))


def write_page(report: Report, file: Path) -> None:
    """Write the page: summary, sizes, errors per head and layer, and spectra."""
    name = Path(report.source).resolve().name
    body = [
        f"<h1>{html.escape(name)}, {html.escape(headline(report))}</h1>",
        *_trade(report),
        f"<p>The {report.model_type} checkpoint {html.escape(report.source)} was compressed by method {report.method}, "
        f"{html.escape(size_text(report))}, and written in layout {report.layout}"
        f"{'' if report.store == 'float' else f', with factors in {report.store}'}. Its parameters are the entries of "
        "weights, biases and factors.</p>",
        f"<p>To load it, put its path in the place of <code>folder</code>: <code>{html.escape(report.load)}</code></p>",
        table(["", "before", "after"], summarise(report)),
        "<h2>Numbers and bytes before and after</h2>",
        svg(size_bars(report), "parameters"),
        *_curve(report),
        *_rounded(report),
        "<h2>Error of every head</h2>",
        "<p>Relative Frobenius error of each head's operators in homogeneous coordinates, biases included: "
        f"QK gives the scores, OV the output to the residual stream.{_calibration_note(report)}</p>",
        svg(error_maps(report), "errors"),
        table(
            ["layer", "QK error", "OV error", "parameters before", "after"],
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
        *_matrices(report),
        "<h2>Spectra</h2>",
        "<p>Every line shows the singular values of one original operator, divided by the largest of them. "
        "A head whose line falls early has a low effective rank.</p>",
        svg(spectra(report), "spectra"),
    ]
    file.write_text(page(name, body), encoding="utf-8")


def _trade(report: Report) -> list[str]:
    """Return the conclusion and the table of bytes and errors beside plain int8, if there are errors on a text."""
    conclusion, error = verdict(report), report.plain_measured
    if report.measured is None or error is None or conclusion is None:
        return []
    n_bytes = [report.compressed(sizes) for sizes in (report.bytes_before, report.bytes_after)]
    sizes = [("original", n_bytes[0], 0.0), (f"method {report.method}", n_bytes[1], report.measured)]
    rows = [
        [label, f"{size / 1e6:.2f}", f"{8 * size / report.n_before:.2f}", f"{distance:.2g}"]
        for label, size, distance in (*sizes, (INT8, report.plain_bytes, error))
    ]
    return [
        f"<p>{html.escape(conclusion[0].upper() + conclusion[1:])}.</p>",
        table(["", f"MB of the {report.subject}", "bits per parameter", f"{report.measure} on held-out text"], rows),
        "<p>Plain int8 has one scale per output.</p>",
    ]


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


def _matrices(report: Report) -> list[str]:
    """Return the table of the matrices outside the attention, if there are any."""
    if not report.matrices or report.is_rounded:
        return []
    rows = [[m.module, m.role, m.kind, f"{m.n_before:,}", f"{m.n_after:,}"] for m in report.matrices]
    head = ["matrix", "role", "factors", "parameters before", "after"]
    return ["<h2>Other matrices</h2>", table(head, rows)]


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


def _calibration_note(report: Report) -> str:
    """Return a note on operator errors for a calibrated compression, else an empty string."""
    if report.measure == RELATIVE:
        return ""
    return (
        " With calibration data these errors are large, because they include directions that do not occur in the text."
    )
