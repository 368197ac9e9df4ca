"""Draw the first table of docs/study.md: what every method keeps of the embeddings, at every fraction.

    python -m benchmarks.study_picture

Writes docs/pictures/study.png.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.calibrated import REPEATED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parent.parent / "docs"
COLUMNS = {"mean": "manuals: cosine, mean", "worst": "manuals: cosine, worst"}
# one hue for what belongs together: grey without a text, blue and red whitened, green calibrated
STYLES: dict[str, dict[str, Any]] = {
    "matrices": {"color": "0.55", "marker": "s"},
    "heads": {"color": "0.35", "marker": "o"},
    "matrices whitened": {"color": "#56b4e9", "marker": "s"},
    "heads whitened": {"color": "#0072b2", "marker": "o"},
    "ttm whitened": {"color": "#e69f00", "marker": "^"},
    "tucker whitened": {"color": "#c0504d", "marker": "v"},
    "calibrated, no fit": {"color": "#7cbf6b", "marker": "o"},
    "calibrated, W_O refitted": {"color": "#2f9443", "marker": "o"},
    "calibrated": {"color": "#00602b", "marker": "o", "linewidth": 2.8},
    "calibrated, then tuned": {"color": "black", "marker": "D", "linestyle": (0, (3, 2))},
}

Points = dict[float, float]  # fraction kept -> 1 - cosine


def read_table(page: str) -> list[dict[str, str]]:
    """Return the rows of the first table of measurements on a page, by the names of its columns."""
    lines = page.splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith(("| method | keep", "| what | method | keep")))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    names = rows[0]
    return [dict(zip(names, row, strict=True)) for row in rows[2:]]


def lines_of(table: Sequence[dict[str, str]], column: str) -> dict[str, Points]:
    """Return the line of every method, on text of both kinds; the mean over seeds."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table:
        if row["text"] == "both":
            found[row["method"]][float(row["keep"])].append(1 - float(row[column]))
    return {
        method: {keep: sum(many) / len(many) for keep, many in sorted(points.items())}
        for method, points in found.items()
    }


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


def main() -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    table = read_table((DOCS / "study.md").read_text(encoding="utf-8"))
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)  # type: ignore[union-attr]
    axes = figure.subplots(1, 2)
    for ax, (name, column) in zip(axes, COLUMNS.items(), strict=True):
        draw(ax, lines_of(table, column))
        ax.set_xlabel("numbers of the attention that are kept")
        ax.set_title(f"{name} of 300 sentences")
        ax.grid(visible=True, which="both", linewidth=0.3)
        ax.set_xticks([0.25, 0.5, 0.75])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("1 - cosine to the embedding before")
    figure.savefig(DOCS / "pictures" / "study.png", dpi=120)


if __name__ == "__main__":
    main()
