"""Draw the pictures of the study: errors over the fraction kept, and over bits per parameter.

    python -m benchmarks.study_picture

Writes docs/pictures/study.png and docs/pictures/frontier.png.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import bits, calibrated
from benchmarks.calibrated import REPEATED
from benchmarks.study_tables import Row, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

DOCS = Path(__file__).parent.parent / "docs"
COLUMNS = {"mean": "manuals: cosine, mean", "worst": "manuals: cosine, worst"}
# one hue for what belongs together: grey without a text, blue SVD-LLM, green calibrated
STYLES: dict[str, dict[str, Any]] = {
    "matrices": {"color": "0.55", "marker": "s"},
    "heads": {"color": "0.35", "marker": "o"},
    "SVD-LLM": {"color": "#56b4e9", "marker": "s"},
    "calibrated, no fit": {"color": "#7cbf6b", "marker": "o"},
    "calibrated": {"color": "#00602b", "marker": "o", "linewidth": 2.8},
    "calibrated, then tuned": {"color": "black", "marker": "D", "linestyle": (0, (3, 2))},
}

# grey: nearest, blue: GPTQ, orange: AWQ, other hues: low rank, dashed in int8
FRONTIER: dict[str, dict[str, Any]] = {
    "nearest": {"color": "0.55", "marker": "s"},
    "nearest, symmetric": {"color": "0.35", "marker": "o"},
    "gptq": {"color": "#56b4e9", "marker": "s"},
    "gptq, activation order": {"color": "#2a87c4", "marker": "^"},
    "gptq, symmetric": {"color": "#004f8a", "marker": "o"},
    "awq": {"color": "#e69f00", "marker": "D"},
    "svd-llm": {"color": "#c0504d", "marker": "v"},
    "svd-llm, int8": {"color": "#c0504d", "marker": "o", "linestyle": (0, (3, 2))},
    "two-sided": {"color": "#7b5aa6", "marker": "v"},
    "two-sided, int8": {"color": "#7b5aa6", "marker": "o", "linestyle": (0, (3, 2))},
    "modegpt": {"color": "#b07d62", "marker": "v"},
    "modegpt, int8": {"color": "#b07d62", "marker": "o", "linestyle": (0, (3, 2))},
    "a3": {"color": "#d487b5", "marker": "v"},
    "a3, int8": {"color": "#d487b5", "marker": "o", "linestyle": (0, (3, 2))},
    bits.TNLIB: {"color": "#00602b", "marker": "o", "linewidth": 2.8},
}
PANELS = {
    ("minilm", "attention"): ("MiniLM, attention", "manuals: cosine, mean"),
    ("minilm", "all"): ("MiniLM, all weights", "manuals: cosine, mean"),
    ("llama", "attention"): ("built-in Llama, attention", "manuals: divergence (nats a token)"),
    ("llama", "all"): ("built-in Llama, all weights", "manuals: divergence (nats a token)"),
}

NAMES = {  # of the methods, as their authors write them
    "nearest": "round to nearest",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "svd-llm": "SVD-LLM",
    "two-sided": "two-sided SVD",
    "modegpt": "MoDeGPT",
    "a3": "A3",
    bits.TNLIB: f"tnlib, {bits.TNLIB}",
}

Points = dict[float, float]  # fraction kept, or bits per parameter -> 1 - cosine, or divergence


def lines_of(table: Sequence[Row], column: str, x: str = "keep") -> dict[str, Points]:
    """Return the line of every method over column `x`, on text of both kinds, with the first seed."""
    found: dict[str, Points] = defaultdict(dict)
    for row in table:
        if row["text"] == "both" and row["seed"] == "0":
            value = float(row[column])
            found[row["method"]][float(row[x])] = 1 - value if "cosine" in column else value
    return {method: dict(sorted(points.items())) for method, points in found.items()}


def draw(ax: Axes, lines: dict[str, Points]) -> None:
    """Draw every line, with its name where it ends on the right."""
    for method, points in lines.items():
        style = {"linewidth": 1.4, "markersize": 4.5} | STYLES.get(method, {})
        ax.plot(list(points), list(points.values()), **style)
    ax.set_yscale("log")
    ax.set_xlim(0.23, 0.77)
    ends = {method: points[max(points)] for method, points in lines.items()}
    low, high = ax.get_ylim()
    for (method, end), place in zip(ends.items(), spread(list(ends.values()), (high / low) ** (1 / 21)), strict=True):
        ax.annotate(
            method,
            (0.75, end),
            (0.80, place),
            textcoords="data",
            va="center",
            fontsize=8.5,
            color=STYLES.get(method, {}).get("color", "black"),
            weight="bold" if method == REPEATED else "normal",
            arrowprops={"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "shrinkB": 4, "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def spread(values: Sequence[float], least: float) -> list[float]:
    """Return positive numbers moved apart until neighbours differ by a factor of at least `least`, in their order."""
    order = sorted(range(len(values)), key=lambda k: values[k])
    moved = list(values)
    for _ in range(200):
        for one, other in pairwise(order):
            apart = moved[other] / moved[one]
            if apart < least:
                step = (least / apart) ** 0.5
                moved[one], moved[other] = moved[one] / step, moved[other] * step
    return moved


def draw_study() -> Figure:
    """Draw the errors over the fraction of MiniLM's attention, with names where the lines end."""
    from matplotlib.figure import Figure

    table = read_rows(calibrated.ATTENTION["minilm"])
    figure = Figure(figsize=(7, 9.6), layout="constrained")  # one column: readable on the screen of a phone
    axes = figure.subplots(2, 1)
    for ax, (name, column) in zip(axes, COLUMNS.items(), strict=True):
        draw(ax, lines_of(table, column))
        ax.set_xlabel("fraction of the parameters of the attention")
        ax.set_ylabel("1 - cosine similarity to the original embedding")
        ax.set_title(f"{name} of 300 sentences")
        ax.set_xticks([0.25, 0.5, 0.75])
        label_errors(ax)
    return figure


def draw_frontier() -> Figure:
    """Draw the tables of errors over bits per parameter, with one legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 9.4), layout="constrained")  # readable on the screen of a phone, too
    axes = figure.subplots(2, 2).ravel()
    names: dict[str, Line2D] = {}
    for ax, (key, (title, column)) in zip(axes, PANELS.items(), strict=True):
        table = read_rows(bits.TABLES[key])
        for method, points in lines_of(table, column, "bits").items():
            style = {"linewidth": 1.4, "markersize": 4.5} | FRONTIER[method]
            (names[method],) = ax.plot(list(points), list(points.values()), **style)
        ax.set_yscale("log")
        ax.set_xlabel("bits per parameter")
        ax.set_title(title)
        ax.set_ylabel("1 - cosine similarity, mean" if "cosine" in column else "KL divergence, nats per token")
        label_errors(ax)
    figure.legend(
        [names[one] for one in FRONTIER if one in names],
        [name_of(one) for one in FRONTIER if one in names],
        loc="outside lower center",
        ncols=4,
        fontsize=9,
        frameon=False,
    )
    return figure


def name_of(method: str) -> str:
    """Return the name of a method as its authors write it: "GPTQ, activation order" for "gptq, activation order"."""
    name, comma, variant = method.partition(", ")
    return NAMES[name] + comma + variant


def label_errors(ax: Axes) -> None:
    """Label a logarithmic axis of errors by 1, 3, 10, ..."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ax.grid(visible=True, which="both", linewidth=0.3)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    for name, draw_picture in (("study", draw_study), ("frontier", draw_frontier)):
        draw_picture().savefig(DOCS / "pictures" / f"{name}.png", dpi=150)


if __name__ == "__main__":
    main()
