"""A report in a few lines, for the page and for the terminal."""

from __future__ import annotations

from tnlib_adapters.compression.report import Report

Line = tuple[str, str, str]  # what it is, before and after; "" where there is nothing to say


def summarise(report: Report) -> list[Line]:
    """Return the numbers and bytes of what was compressed, the errors, and what it took."""
    return [*_sizes(report), *_errors(report), *_cost(report)]


def _sizes(report: Report) -> list[Line]:
    before, after, subject = report.bytes_before, report.bytes_after, report.subject
    lines = [
        (f"numbers in the {subject}", f"{report.n_before:,}", f"{report.n_stored:,}"),
        (f"bytes of the {subject}", _mb(report.compressed(before)), _mb(report.compressed(after))),
        ("the same in plain int8", "", _mb(report.plain_bytes)),
        ("all weights on disk", _mb(sum(before.values())), _mb(sum(after.values()))),
    ]
    if report.layout == "dense":
        lines.insert(1, ("numbers of the factors it was multiplied from", "", f"{report.n_after:,}"))
    if report.left_out:
        lines.append(("weights in other formats, left out", ", ".join(report.left_out), ""))
    return lines


def _errors(report: Report) -> list[Line]:
    found = {"predicted": report.predicted, "measured": report.measured, "of plain int8": report.plain_measured}
    lines = [(f"{report.measure}, {name}", "", f"{value:.4g}") for name, value in found.items() if value is not None]
    told = report.quality
    for key, value in told.items():
        name, _, when = key.rpartition(", ")
        if when == "before" and f"{name}, after" in told:
            lines.append((name, f"{value:.3f}", f"{told[f'{name}, after']:.3f}"))
        elif when != "after" or f"{name}, before" not in told:
            lines.append((key, "", f"{value:.3f}"))
    return lines


def _cost(report: Report) -> list[Line]:
    return [("time", "", f"{report.seconds:.1f} s"), ("peak memory", "", f"{report.peak_memory / 1e6:.0f} MB")]


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.2f} MB"
