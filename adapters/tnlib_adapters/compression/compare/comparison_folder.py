"""Comparison of methods written into a folder: compare.csv, and compare.png drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
from tnlib_adapters.compression.compare.by_layer import Comparison, Row, compare
from tnlib_adapters.compression.compare.on_text import DEFAULT_BITS, TextComparison, compare_on_text
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.methods.table import TABLE
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.compression.text import read_text
from tnlib_adapters.files.atomic_folder import check_target, scratch_folder, whole_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSV, PICTURE = "compare.csv", "compare.png"


def write_comparison(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keeps: Sequence[float],
    bits: Sequence[float] = DEFAULT_BITS,
    methods: Sequence[str] = (),
    calibrate: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress = quiet,
) -> Comparison | TextComparison:
    """Compare methods on a checkpoint folder, and write the rows and a picture into a folder.

    Parameters
    ----------
    source
        Folder with config.json and safetensors.
    out
        Folder for compare.csv and compare.png; it appears complete or not at all.
    keeps
        Fractions of the attention parameters, measured in descending order.
    bits
        Average stored bits per number, for method "quantized", which needs a text.
    methods
        Names of methods; all by default.
    calibrate
        Text file in UTF-8: errors are then measured on a held-out tenth of it (`compare_on_text`), otherwise on the
        operators of every layer (`compare`).
    force
        Replace `out` if it is not empty.
    progress
        Called as progress(stage, done, total).

    Raises
    ------
    ArgumentError, MissingFileError, FileFormatError
        As `compare` and `compare_on_text` do, and if `out` cannot be written.
    """
    text = None if calibrate is None else read_text("compare", "calibrate", calibrate)
    checkpoint, target = open_checkpoint(source), as_path("compare", "out", out)
    check_target("compare", target, checkpoint.folder.path, force=force)
    fractions = sorted(set(keeps), reverse=True)
    comparison: Comparison | TextComparison
    with scratch_folder(target) as scratch:
        workspace = Workspace(folder=scratch)
        if text is None:
            comparison = compare(checkpoint, fractions, methods, progress, workspace=workspace)
            figure = draw_by_layer(comparison)
        else:
            averages = sorted(set(bits), reverse=True)
            comparison = compare_on_text(
                checkpoint, fractions, text, methods, progress, bits=averages, workspace=workspace
            )
            figure = draw_on_text(comparison)
    with whole_folder(target) as partial:
        comparison.write_csv(partial / CSV)
        figure.savefig(partial / PICTURE, dpi=150)
    return comparison


def draw_by_layer(comparison: Comparison) -> Figure:
    """Draw error against numbers, one line per method through the mean over layers, one dot per layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, name in zip(axes, ("qk_error", "ov_error"), strict=True):
        for method in dict.fromkeys(row.method for row in comparison.rows):
            mine = [row for row in comparison.rows if row.method == method]
            fractions, mean = zip(
                *[_mean(mine, keep, name) for keep in sorted({row.keep for row in mine})], strict=True
            )
            (line,) = ax.plot(fractions, mean, "o-", ms=5, label=method, color=TABLE[method].color)
            points = [row.n_after / row.n_before for row in mine], [getattr(row, name) for row in mine]
            ax.plot(*points, ".", ms=4, alpha=0.35, color=line.get_color())
        ax.set(title=f"{name[:2].upper()} operators", xlabel="fraction of the parameters kept", ylim=(0, 1.05))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("relative error (large: mean, small: each layer)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _mean(rows: Sequence[Row], keep: float, name: str) -> tuple[float, float]:
    """Return the fraction kept over all layers, and the mean of their errors."""
    mine = [row for row in rows if row.keep == keep]
    fraction = sum(row.n_after for row in mine) / sum(row.n_before for row in mine)
    return fraction, sum(getattr(row, name) for row in mine) / len(mine)


def draw_on_text(comparison: TextComparison) -> Figure:
    """Draw error against numbers kept, and against attention bytes, with factors as stored and in int8."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name, mine in comparison.by_method.items():
        style, errors = _style(name), [row.error for row in mine]
        in_int8 = [(r.n_bytes_int8 / 1e6, r.error_int8) for r in mine if r.n_bytes_int8 is not None]
        rounded = not in_int8  # no numbers are left out
        if not rounded:
            axes[0].plot([row.kept for row in mine], errors, "o-", ms=5, label=name, **style)
            axes[1].plot(*zip(*in_int8, strict=True), "s--", ms=4, **style)
        label = name if rounded else None
        axes[1].plot([row.n_bytes / 1e6 for row in mine], errors, "o-", ms=5, label=label, **style)
    for row, mark in zip(comparison.rounded, "*P", strict=True):
        axes[1].plot(row.n_bytes / 1e6, row.error, mark, ms=12, color="black", label=row.method)
    axes[1].plot([], [], "s--", ms=4, color="grey", label="the same factors in int8")
    axes[1].axvline(comparison.bytes_before / 1e6, color="grey", lw=1, label="source")
    axes[0].set(xlabel="numbers kept", ylabel=comparison.measure, yscale="log", xlim=(0, 1))
    axes[0].xaxis.set_major_formatter(PercentFormatter(1.0))
    axes[1].set(xlabel="MB of the attention", xlim=(0, None))
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[1]:
            ax.legend(frameon=False, fontsize=9)
    return figure


def _style(row: str) -> dict[str, Any]:
    """Return line properties: colour by method, pale without a text, thick for fitted factors."""
    method, _, whitened = row.partition(", ")
    fitted = TABLE[method].unit == "model"
    return {
        "color": TABLE[method].color,
        "alpha": 1.0 if whitened or fitted else 0.4,
        "linewidth": 2.8 if fitted else 1.5,
    }
