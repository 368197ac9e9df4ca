"""Tables of the study: CSV files in docs/tables, one for a model and a part of it, and a column of them in Markdown.

python -m benchmarks.study_tables bits-minilm-all "manuals: cosine, mean"
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import click

TABLES = Path(__file__).parent.parent / "docs" / "tables"
Row = dict[str, str]


def read_rows(name: str) -> list[Row]:
    """Return the rows of a table."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(name: str, rows: Sequence[Row]) -> None:
    """Write a table; the first row names the columns."""
    with (TABLES / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def merged(old: Sequence[Row], new: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Return the rows of a table, new ones in the place of those with the same values in the columns `key`, or last."""
    kept = [row for row in old if list(row) == list(new[0])]
    return [*{tuple(row[name] for name in key): row for row in [*kept, *new]}.values()]


def by_size(rows: Sequence[Row], column: str) -> list[str]:
    """Return one column for the text "both" and seed 0 in Markdown: a line a method, a column a size."""
    size = "keep" if "keep" in rows[0] else "budget"
    rows = [row for row in rows if (row["text"], row["seed"]) == ("both", "0")]
    parts = ["what"] if "what" in rows[0] else []
    sizes = sorted({row[size] for row in rows}, key=float, reverse=True)
    cells: dict[tuple[str, ...], Row] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in [*parts, "method"]), {})[row[size]] = row[column]
    lines = [(*parts, "method", *sizes), ("---",) * (len(parts) + 1 + len(sizes))]
    lines += [(*key, *(values.get(own, "") for own in sizes)) for key, values in cells.items()]
    return [f"| {' | '.join(line)} |" for line in lines]


@click.command()
@click.argument("name")
@click.argument("column")
def main(name: str, column: str) -> None:
    print(*by_size(read_rows(name), column), sep="\n")


if __name__ == "__main__":
    main()
