"""Matplotlib figures of a compression report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib_adapters.compression.methods.factorisation import RELATIVE
from tnlib_adapters.compression.report.report import INT8, HeadReport, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QK, OV = "#3b6ea5", "#c8553d"
GREY = "#b8b8b8"


def error_maps(report: Report) -> Figure:
    """Draw the relative error of every head's QK and OV operator, layers as rows and heads as columns."""
    from matplotlib.figure import Figure

    n_layers = len(report.layers)
    n_heads = len(report.heads) // n_layers
    figure = Figure(figsize=(max(7.0, 1.3 + 0.55 * 2 * n_heads), 1.6 + 0.42 * n_layers), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    top = max(1e-12, *(max(head.qk_error, head.ov_error) for head in report.heads))
    for ax, name in zip(axes, ("qk", "ov"), strict=True):
        errors = np.array([getattr(head, f"{name}_error") for head in report.heads]).reshape(n_layers, n_heads)
        image = ax.imshow(errors, vmin=0, vmax=top)
        ax.set(title=f"{name.upper()} operators", xlabel="head", xticks=range(n_heads), yticks=range(n_layers))
        if n_layers * n_heads <= 200:
            _write_values(ax, errors, top)
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="relative error", shrink=0.9)
    return figure


def _write_values(ax: Axes, values: Any, top: float) -> None:
    for (row, column), value in np.ndenumerate(values):
        dark = value < 0.6 * top
        label = f"{value:.2f}".removeprefix("0") if value < 0.995 else f"{value:.1f}"
        ax.text(column, row, label, ha="center", va="center", color="white" if dark else "black", fontsize=8)


def spectra(report: Report) -> Figure:
    """Draw the singular values of every head's operators, one panel per layer, and the truncation ranks."""
    from matplotlib.figure import Figure

    n_layers = len(report.layers)
    columns = min(3, n_layers)
    rows = -(-n_layers // columns)
    figure = Figure(figsize=(3.6 * columns, 0.5 + 2.5 * rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).ravel()
    for layer, ax in enumerate(axes):
        if layer >= n_layers:
            ax.set_visible(False)
            continue
        heads = [head for head in report.heads if head.layer == layer]
        _draw_spectra(ax, heads)
        ax.set(title=f"layer {layer}", yscale="log", xlabel="singular value", ylabel="relative size")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.label_outer()
        if layer + columns >= n_layers:  # lowest panel of its column, also where the last row is shorter
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("singular value")
    figure.legend(*_legend(report.heads[0].qk_kept is not None), loc="outside upper center", ncols=3, frameon=False)
    return figure


def _draw_spectra(ax: Axes, heads: Sequence[HeadReport]) -> None:
    for head in heads:
        for colour, values, rank in ((QK, head.qk_spectrum, head.qk_kept), (OV, head.ov_spectrum, head.ov_kept)):
            relative = np.array(values) / (values[0] or 1.0)
            plotted = relative > 1e-8  # smaller values are roundoff, or belong to absent biases and heads
            ax.plot(np.arange(1, len(relative) + 1)[plotted], relative[plotted], color=colour, alpha=0.5, lw=1)
            if rank and plotted[rank - 1]:
                ax.plot(rank, relative[rank - 1], "o", color=colour, ms=3.5)


def _legend(with_cut: bool) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=QK), Line2D([], [], color=OV)]
    names = ["QK operators", "OV operators"]
    if with_cut:
        lines.append(Line2D([], [], color="black", marker="o", ls="none", ms=3.5))
        names.append("last value kept")
    return lines, names


def error_curve(report: Report) -> Figure:
    """Draw predicted error against bytes, the chosen and measured points, and plain int8."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    ax = figure.subplots()
    unit, n_bytes = _bytes_per_unit(report)
    sizes, errors = (np.array(report.curve.get(name, [])) for name in (unit, "predicted"))
    largest = errors.max(initial=0.0)
    plotted = errors > 1e-4 * largest  # the logarithmic axis ends four decades below the largest error
    ax.plot(n_bytes / 1e6 * sizes[plotted], errors[plotted], color=QK, label="predicted")
    x = n_bytes / 1e6 * (report.kept if unit == "kept" else report.average_bits or 0.0)
    if report.predicted is not None:
        label = f"chosen: {report.predicted:.3g} predicted"
        ax.plot(x, report.predicted, "o", color=QK, mfc="none", ms=11, mew=1.5, label=label)
    if report.measured is not None:
        ax.plot(x, report.measured, "D", color=OV, ms=5, label=f"measured: {report.measured:.3g}", zorder=3)
    if report.plain_measured is None:
        label = f"{INT8}: {report.plain_bytes / 1e6:.2f} MB"
        ax.axvline(report.plain_bytes / 1e6, color="black", ls=":", lw=1, label=label)
    else:
        label = f"{INT8}, {report.plain_bytes / 1e6:.2f} MB: {report.plain_measured:.2g} measured"
        point = report.plain_bytes / 1e6, report.plain_measured
        ax.plot(*point, "*", color="black", ms=10, label=label, clip_on=False)
    stored = ", in factors" if report.layout == "dense" else ""
    ax.set(xlabel=f"MB of the {report.subject}{stored}", ylabel=report.measure, xlim=(0, None))
    if report.measure == RELATIVE or not plotted.any():
        ax.set_ylim(0, None)
    else:
        ax.set_yscale("log")
    _draw_sizes_above(ax, unit, n_bytes)
    ax.grid(alpha=0.3)
    ax.spines["right"].set_visible(False)
    ax.legend(frameon=False)
    return figure


def _draw_sizes_above(ax: Axes, unit: str, n_bytes: float) -> None:
    """Draw a second axis above, in fractions of the parameters or in bits per parameter."""
    from matplotlib.ticker import PercentFormatter

    scale = n_bytes / 1e6

    def size_of(x: Any) -> Any:
        return x / scale

    def x_of(size: Any) -> Any:
        return size * scale

    above = ax.secondary_xaxis("top", functions=(size_of, x_of))
    if unit == "kept":
        above.xaxis.set_major_formatter(PercentFormatter(1.0))
    above.set_xlabel("parameters kept" if unit == "kept" else "bits per parameter")


def _bytes_per_unit(report: Report) -> tuple[str, float]:
    """Return the unit of the curve, and the bytes for a size of 1 in the factored layout."""
    if "bits" in report.curve:
        return "bits", report.n_before / 8
    if report.layout == "dense":
        return "kept", float(report.compressed(report.bytes_before))
    return "kept", report.compressed(report.bytes_after) / report.kept


def size_bars(report: Report) -> Figure:
    """Draw the numbers and bytes of the compressed part and of the rest of the model, before and after."""
    from matplotlib.figure import Figure

    numbers = [(report.n_before, report.n_other), (report.n_stored, report.n_other)]
    sizes = [
        (report.compressed(b), sum(b.values()) - report.compressed(b))
        for b in (report.bytes_before, report.bytes_after)
    ]
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots(1, 2)
    _draw_bars(axes[0], numbers, "parameters", "", report.subject)
    _draw_bars(axes[1], sizes, "bytes on disk", "B", report.subject)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def _draw_bars(ax: Axes, pairs: Sequence[tuple[int, int]], label: str, unit: str, subject: str) -> None:
    """Draw pairs (compressed part, rest) before and after as stacked bars."""
    from matplotlib.ticker import EngFormatter

    names = ["before", "after"]
    attention, other = [a for a, _ in pairs], [b for _, b in pairs]
    ax.barh(names, attention, color=QK, label=subject)
    ax.barh(names, other, left=attention, color=GREY, label="everything else")
    widest = max(a + b for a, b in pairs)
    rounded = EngFormatter(unit, places=2)
    for y, (a, b) in enumerate(pairs):
        ax.text(
            a + b + 0.01 * widest, y, rounded(a), va="center", fontsize=8, color=QK
        )  # colour of the compressed part
    ax.invert_yaxis()
    ax.set(xlabel=label, xlim=(0, 1.25 * widest))
    ax.locator_params(axis="x", nbins=5)
    ax.xaxis.set_major_formatter(EngFormatter(unit))  # 20 k, 3 MB
    ax.spines[["top", "right"]].set_visible(False)
