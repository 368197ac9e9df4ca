"""Matplotlib pictures of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tnlib_adapters.compression.compare.by_layer import Comparison, Row
    from tnlib_adapters.compression.compare.on_text import TextComparison

_HUES = {"matrix": "#0072b2", "ttm": "#e69f00", "tucker": "#c0504d", "heads": "#8064a2", "calibrated": "#00602b"}


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
            (line,) = ax.plot(fractions, mean, "o-", ms=5, label=method)
            each = [row.n_after / row.n_before for row in mine], [getattr(row, name) for row in mine]
            ax.plot(*each, ".", ms=4, alpha=0.35, color=line.get_color())
        ax.set(title=f"{name[:2].upper()} operators", xlabel="fraction of the numbers kept", ylim=(0, 1.05))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("relative error: mean, and each layer")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _mean(rows: Sequence[Row], keep: float, name: str) -> tuple[float, float]:
    """Return the fraction kept over all layers, and the mean of their errors."""
    mine = [row for row in rows if row.keep == keep]
    fraction = sum(row.n_after for row in mine) / sum(row.n_before for row in mine)
    return fraction, sum(getattr(row, name) for row in mine) / len(mine)


def draw_on_text(found: TextComparison) -> Figure:
    """Draw error against numbers kept, and against attention bytes, with factors as stored and in int8."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name, mine in found.by_method.items():
        style, errors = _style(name), [row.error for row in mine]
        axes[0].plot([row.kept for row in mine], errors, "o-", ms=5, label=name, **style)
        axes[1].plot([row.n_bytes / 1e6 for row in mine], errors, "o-", ms=5, **style)
        axes[1].plot([r.n_bytes_int8 / 1e6 for r in mine], [r.error_int8 for r in mine], "s--", ms=4, **style)
    for row, mark in zip(found.rounded, "*P", strict=True):
        axes[1].plot(row.n_bytes / 1e6, row.error, mark, ms=12, color="black", label=f"weights {row.method}")
    axes[1].plot([], [], "s--", ms=4, color="grey", label="the same factors in int8")
    axes[1].axvline(found.bytes_before / 1e6, color="grey", lw=1, label="as it is")
    axes[0].set(xlabel="numbers kept", ylabel=found.measure, yscale="log", xlim=(0, 1))
    axes[0].xaxis.set_major_formatter(PercentFormatter(1.0))
    axes[1].set(xlabel="MB of the attention", xlim=(0, None))
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=9)
    return figure


def _style(row: str) -> dict[str, Any]:
    """Return line properties: hue by method, pale without a text, thick with fine-tuning."""
    method, _, whitened = row.partition(", ")
    fitted = method == "calibrated"
    return {
        "color": _HUES[method],
        "alpha": 1.0 if whitened or fitted else 0.4,
        "linewidth": 2.8 if fitted else 1.5,
    }
