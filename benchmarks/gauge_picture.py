"""Picture of what a gauge does to the weights of SmolLM2: their entries and singular values.

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


def weights_of(checkpoint: Checkpoint) -> tuple[Array, Array]:
    """Return W_gate (d, units) and W_V of the first head (d, d_head)."""
    part = checkpoint.wiring.layers[LAYER].feed_forward
    if part is None or part.gate is None:
        raise SystemExit("gauge_picture: the layer has no gate.")
    return part.gate.on_rows(checkpoint.read(part.gate.weight)), checkpoint.attention(LAYER).W_V[0]


def main() -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    source = smollm2_or_exit()
    folded = tnlib_adapters.fold(tnlib_adapters.open_checkpoint(source)).checkpoint
    models = {"trained": folded, "chosen": tnlib_adapters.choose_gauge(folded).checkpoint}
    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    entries, spectra = figure.subplots(1, 2)
    for name, model in models.items():
        gate, values = weights_of(model)
        style = {"color": COLOURS[name], "label": name}
        wide = {"trained": {"lw": 5, "alpha": 0.35}, "chosen": {"ls": "--"}}[name]  # the two lines coincide
        sizes = (gate / np.sqrt(np.square(gate).mean(axis=0))).ravel()
        print(name, "largest entry of W_gate / rms", f"{np.abs(sizes).max():.1f}")
        entries.hist(sizes, np.linspace(-12, 12, 97).tolist(), histtype="step", density=True, **style)
        spectra.semilogy(np.linalg.svd(values, compute_uv=False), **{**style, "label": f"{name}, W_V"})
        style |= {**wide, "label": f"{name}, W_gate"}
        spectra.semilogy(np.linalg.svd(gate, compute_uv=False)[::9], **style)
    x = np.linspace(-6, 6, 200)
    entries.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color="0.5", lw=0.8, ls=":", label="normal")
    entries.set(
        yscale="log",
        ylim=(1e-6, 1),
        xlabel="entry / root mean square of its column",
        ylabel="probability density",
        title="entries of W_gate",
    )
    spectra.set(
        xlabel="index (W_gate: every ninth)",
        ylabel="singular value",
        title="singular values of W_V (head 0) and W_gate",
    )
    spectra.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    spectra.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    spectra.yaxis.set_minor_formatter(NullFormatter())
    for ax in (entries, spectra):
        ax.legend(frameon=False, fontsize=9)
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
