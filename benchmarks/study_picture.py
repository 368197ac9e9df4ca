"""Draw the first table of docs/study.md: what every method keeps of the embeddings, at every fraction.

    python -m benchmarks.study_picture

Writes docs/pictures/study.png.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
COLUMNS = {"mean": "manuals: cosine, mean", "worst": "manuals: cosine, worst"}


def read_table(page: str) -> list[dict[str, str]]:
    """Return the rows of the first table of measurements on a page, by the names of its columns."""
    lines = page.splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("| method | keep"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    names = rows[0]
    return [dict(zip(names, row, strict=True)) for row in rows[2:]]


def main() -> None:
    from matplotlib.figure import Figure

    lines: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    table = read_table((DOCS / "study.md").read_text(encoding="utf-8"))
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    for ax, (name, column) in zip(axes, COLUMNS.items(), strict=True):
        lines.clear()
        for row in table:
            if row["text"] == "both":
                lines[row["method"]][float(row["keep"])].append(1 - float(row[column]))
        for k, (method, points) in enumerate(lines.items()):
            keeps = sorted(points)
            means = [sum(points[keep]) / len(points[keep]) for keep in keeps]
            best = method == "heads fitted"
            ax.plot(keeps, means, "o-", label=method, color=f"C{k}", linewidth=2.5 if best else 1.2)
        ax.set_yscale("log")
        ax.set_xlabel("numbers of the attention that are kept")
        ax.set_title(f"{name} of 300 sentences")
        ax.grid(visible=True, which="both", linewidth=0.3)
        ax.set_xticks([0.25, 0.5, 0.75])
    axes[0].set_ylabel("1 - cosine to the embedding before")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(DOCS / "pictures" / "study.png", dpi=120)


if __name__ == "__main__":
    main()
