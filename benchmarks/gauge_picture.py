"""Picture of what a gauge does to the weights of SmolLM2: entries, singular values, and sizes of feed-forward units.

    python -m benchmarks.smollm2
    python -m benchmarks.gauge_picture

Draws weights of one layer with norms folded, in the trained gauge and in that of `choose_gauge`, into
docs/pictures/gauge-weights.png.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tnlib_adapters
from tnlib_adapters import Checkpoint

from benchmarks.smollm2 import smollm2_or_exit
from tnlib._typing import Array

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "gauge-weights.png"
LAYER = 15
COLOURS = {"trained": "#c8553d", "chosen": "#3b6ea5"}


def weights_of(checkpoint: Checkpoint) -> tuple[Array, Array, Array]:
    """Return W_gate (d, units), W_V of the first head (d, d_head) and the norms of the rows of W_down (units,)."""
    part = checkpoint.wiring.layers[LAYER].feed_forward
    if part is None or part.gate is None:
        raise SystemExit("gauge_picture: the layer has no gate.")
    gate, down = (m.on_rows(checkpoint.read(m.weight)) for m in (part.gate, part.down))
    return gate, checkpoint.attention(LAYER).W_V[0], np.linalg.norm(down, axis=1)


def main() -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    source = smollm2_or_exit()
    folded = tnlib_adapters.fold(tnlib_adapters.open_checkpoint(source)).checkpoint
    models = {"trained": folded, "chosen": tnlib_adapters.choose_gauge(folded).checkpoint}
    figure = Figure(figsize=(8.9, 3.4), layout="constrained")
    entries, spectra, units = figure.subplots(1, 3)
    for name, model in models.items():
        gate, values, norms = weights_of(model)
        style = {"color": COLOURS[name], "label": name}
        sizes = (gate / np.sqrt(np.square(gate).mean(axis=0))).ravel()
        print(
            name, "largest entry of W_gate / rms", f"{np.abs(sizes).max():.1f}", "W_down rows", np.ptp(np.log2(norms))
        )
        entries.hist(sizes, np.linspace(-12, 12, 97).tolist(), histtype="step", density=True, **style)
        spectra.semilogy(np.linalg.svd(values, compute_uv=False), **{**style, "label": f"{name}, W_V"})
        dashed = {**style, "label": f"{name}, W_gate", "ls": "--"}
        spectra.semilogy(np.linalg.svd(gate, compute_uv=False)[::9], **dashed)
        units.semilogy(np.sort(norms)[::-1], **style)
    x = np.linspace(-6, 6, 200)
    entries.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color="0.5", lw=0.8, ls=":", label="normal")
    entries.set(
        yscale="log", ylim=(1e-6, 1), xlabel="entry / root mean square of its column", title="entries of W_gate"
    )
    spectra.set(xlabel="index (W_gate: every ninth)", title="singular values of\nW_V (head 0) and W_gate")
    units.set(xlabel="unit, sorted", title="norms of rows of W_down")
    for ax in (spectra, units):
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    for ax in (entries, spectra, units):
        ax.legend(frameon=False, fontsize=9)
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
