"""Draw head scores and attention patterns of the built-in induction model, which `tnlib inspect` has on its page.

    python -m benchmarks.inspect_picture

Writes docs/pictures/inspect.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tnlib_adapters import builtin_path, open_checkpoint
from tnlib_adapters.circuits.heads.pattern_scores import HeadKind
from tnlib_adapters.compression.progress import quiet
from tnlib_adapters.html_page import write_values
from tnlib_adapters.inspection.measure import Inspection, measure, own_tokens

from tnlib._typing import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "inspect.png"


def draw_scores(figure: SubFigure, inspection: Inspection) -> None:
    """Draw three shares of attention and the copying score of every head, layers as rows."""
    scores, copying = inspection.readings.scores, inspection.readings.copying
    if scores is None or copying is None or copying.embeddings is None:
        raise SystemExit("inspect_picture: the model has no head scores.")
    maps: dict[str, Array] = {kind: getattr(scores, kind) for kind in get_args(HeadKind)}
    axes = figure.subplots(2, 2, sharex=True, sharey=True).ravel()
    for ax, (name, values) in zip(axes, maps.items(), strict=False):
        image = ax.imshow(values, vmin=0.0, vmax=1.0, aspect="auto", cmap="Blues")
        ax.set_title(f"{name} token" if name != "induction" else name)
        write_values(image, values)
    figure.colorbar(image, ax=axes[:3:2], label="share of attention", location="left")
    image = axes[3].imshow(copying.embeddings, vmin=-1.0, vmax=1.0, aspect="auto", cmap="PRGn")
    axes[3].set_title("copying of embeddings")
    write_values(image, copying.embeddings)
    figure.colorbar(image, ax=axes[1::2], label="copying score")
    for ax in axes:
        ax.set(xticks=range(values.shape[1]), yticks=range(values.shape[0]))
        ax.set_xlabel("head" if ax in axes[2:] else "")
        ax.set_ylabel("layer" if ax in axes[::2] else "")


def draw_patterns(figure: SubFigure, inspection: Inspection) -> None:
    """Draw the pattern of every head on the repeated segment of the page, layers as rows."""
    if inspection.patterns is None:
        raise SystemExit("inspect_picture: the model has no text of its own.")
    n_layers, n_heads = len(inspection.patterns), len(inspection.patterns[0])
    axes = figure.subplots(n_layers, n_heads, sharex=True, sharey=True)
    for layer, of_layer in enumerate(inspection.patterns):
        for head, pattern in enumerate(of_layer):
            ax = axes[layer, head]
            image = ax.imshow(pattern, vmin=0.0, vmax=1.0, cmap="Blues", interpolation="none")
            ax.set_title(f"head {layer}.{head}")
    figure.colorbar(image, ax=axes, label="attention")
    figure.suptitle("attention patterns, query down, key across", fontsize=11)


def draw(inspection: Inspection) -> Figure:
    """Draw the scores above the patterns."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10.0, "axes.titlesize": 10.0}):
        figure = Figure(figsize=(8.6, 7.6), layout="constrained")  # as wide as a page, so that labels keep 10 points
        parts: Any = figure.subfigures(2, 1, height_ratios=(0.75, 1.0), hspace=0.05)
        draw_scores(parts[0], inspection)
        draw_patterns(parts[1], inspection)
    return figure


def main() -> None:
    checkpoint = open_checkpoint(builtin_path())
    inspection = measure(checkpoint, own_tokens(checkpoint), PICTURE, quiet)
    draw(inspection).savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
