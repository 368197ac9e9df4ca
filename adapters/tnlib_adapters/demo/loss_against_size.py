"""Picture of the demonstration: held-out loss against bytes, low rank beside rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tnlib_adapters.demo.size_and_loss import SizeAndLoss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GREEN, _GREY = "#00602b", "#777777"


def loss_against_size(original: SizeAndLoss, rounded: Sequence[SizeAndLoss], low_rank: Sequence[SizeAndLoss]) -> Figure:
    """Draw the losses of both series over the bytes of the attention, and that of the original as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    ax = figure.subplots()
    for points, colour, marker, label in (
        (rounded, _GREY, "s", "rounded to nearest, groups of 64"),
        (low_rank, _GREEN, "o", "low rank, factors in 4 bits"),
    ):
        ax.plot([p.n_bytes / 1e3 for p in points], [p.loss for p in points], color=colour, marker=marker, label=label)
        for point in points:
            ax.annotate(
                f"{point.bits:.1f}", (point.n_bytes / 1e3, point.loss), (5, 5), textcoords="offset points",
                color=colour, fontsize=8,
            )  # fmt: skip
    ax.axhline(original.loss, color="black", lw=0.8, ls=":", label=f"original, {original.n_bytes / 1e3:.0f} kB")
    ax.set(
        xscale="log", yscale="log", xlabel="kB of the attention (labels: bits per number)",
        ylabel="loss on held-out sequences (nats)", title="Attention of the built-in model; lower left is better",
    )  # fmt: skip
    for axis, ticks in ((ax.xaxis, (10, 15, 20, 30)), (ax.yaxis, (0.5, 1, 2))):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    ax.legend(frameon=False)
    return figure
