"""Summary lines of a compression report, for the page and the terminal."""

from __future__ import annotations

from tnlib_adapters.compression.report.report import Report

Line = tuple[str, str, str]  # label, value before, value after; "" for no value


def summarise(report: Report) -> list[Line]:
    """Return sizes of the compressed part, errors, and cost of the compression."""
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
    errors = {"predicted": report.predicted, "measured": report.measured, "of plain int8": report.plain_measured}
    lines = [(f"{report.measure}, {name}", "", f"{value:.4g}") for name, value in errors.items() if value is not None]
    twice = (f"{report.measure}, on held-out text", *(key for key in report.quality if "predicted" in key))
    quality = {key: value for key, value in report.quality.items() if key not in twice}
    for key, value in quality.items():
        before, after = key.replace(", after", ", before"), key.replace(", before", ", after")
        if before == after or not {before, after} <= quality.keys():
            lines.append((key, "", f"{value:.3f}"))
        elif key == before:
            lines.append((key.replace(", before", ""), f"{value:.3f}", f"{quality[after]:.3f}"))
    return lines


def _cost(report: Report) -> list[Line]:
    return [("time", "", f"{report.seconds:.1f} s"), ("peak memory", "", f"{report.peak_memory / 1e6:.0f} MB")]


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.2f} MB"
