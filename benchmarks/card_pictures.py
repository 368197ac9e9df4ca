"""Draw the pictures of the cards on the first page of the site, small enough for their columns.

python -m benchmarks.card_pictures
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import tnlib_adapters
from tnlib_adapters import circuits

import tnlib
from benchmarks import bits
from benchmarks.study_picture import COLUMNS, DOCS, FRONTIER, label_errors, lines_of
from benchmarks.study_tables import read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 2.9, 2.0  # inches, the column of a card


def draw_bits() -> Figure:
    """Draw three methods on all of MiniLM, named at the ends of their lines."""
    from matplotlib.figure import Figure

    lines = lines_of(read_rows(bits.TABLES["minilm", "all"]), COLUMNS["mean"], "bits")
    names = {"nearest": "round to\nnearest", "gptq": "GPTQ", bits.TNLIB: "tnlib"}
    figure = Figure(figsize=SIZE, layout="constrained")
    ax = figure.subplots()
    for method, name in names.items():
        style = {"linewidth": 1.6, "markersize": 4.5} | FRONTIER[method]
        ax.plot(list(lines[method]), list(lines[method].values()), **style)
        *_, end = lines[method].items()
        ax.annotate(name, end, (6, 0), textcoords="offset points", va="center", color=FRONTIER[method]["color"])
    ax.set_yscale("log")
    ax.set_xticks([2, 3, 4])
    ax.set_xlabel("bits per parameter")
    ax.set_ylabel("1 - cosine")
    label_errors(ax)
    return figure


def draw_heads() -> Figure:
    """Draw the K-composition of all pairs of heads of the built-in model, in multiples of chance."""
    from matplotlib.figure import Figure

    model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    found = circuits.compositions(model, "K").multiples[0, :, 1]
    figure = Figure(figsize=SIZE, layout="constrained")
    ax = figure.subplots()
    ax.imshow(found, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    for (i, j), value in np.ndenumerate(found):
        ax.annotate(f"{value:.1f}", (j, i), ha="center", va="center", color="white" if value > 1.5 else "black")
    ax.set_xticks(range(4), [f"1.{k}" for k in range(4)])
    ax.set_yticks(range(4), [f"0.{k}" for k in range(4)])
    ax.set_xlabel("head that reads")
    ax.set_ylabel("head that writes")
    return figure


def main() -> None:
    from matplotlib import rc_context

    train = tnlib.tt_svd(np.random.default_rng(0).standard_normal((4, 5, 6)), max_rank=4).value
    tnlib.draw(tnlib.canonical_form(train)).save(DOCS / "pictures" / "card-train.svg")
    with rc_context({"font.size": 9.0}):
        for name, draw_picture in (("bits", draw_bits), ("heads", draw_heads)):
            figure = draw_picture()
            figure.savefig(DOCS / "pictures" / f"card-{name}.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
