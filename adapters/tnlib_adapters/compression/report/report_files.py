"""Files of a compression report: JSON, a page, and a note in the model card."""

from __future__ import annotations

from pathlib import Path

from tnlib_adapters.compression.report.html import write_page
from tnlib_adapters.compression.report.report import Report
from tnlib_adapters.compression.request import PAGE, REPORT
from tnlib_adapters.files.folder import NOTE, split_card


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
