"""A report in a few lines, for the page and for the terminal."""

from __future__ import annotations

from tnlib_adapters.compression.report.report import Report

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
    twice = (f"{report.measure}, on held-out text", *(key for key in report.quality if "predicted" in key))
    told = {key: value for key, value in report.quality.items() if key not in twice}
    for key, value in told.items():
        before, after = key.replace(", after", ", before"), key.replace(", before", ", after")
        if before == after or not {before, after} <= told.keys():
            lines.append((key, "", f"{value:.3f}"))
        elif key == before:
            lines.append((key.replace(", before", ""), f"{value:.3f}", f"{told[after]:.3f}"))
    return lines


def _cost(report: Report) -> list[Line]:
    return [("time", "", f"{report.seconds:.1f} s"), ("peak memory", "", f"{report.peak_memory / 1e6:.0f} MB")]


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.2f} MB"
