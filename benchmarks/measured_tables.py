"""Page of all tables of measured values: where they are, and when they were written.

    python -m benchmarks.measured_tables

writes docs/measurements.md from the pages and their history; commit the pages first.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "measurements.md"
# pages and sections whose tables have no measured values
OTHERS = {"choose", "choose-states", "conventions", "gallery", "gauges", "limits", "other-packages"}
OTHER_SECTIONS = {"Passes", "Fewer bits", "Looking inside a checkpoint"}
VALUE = re.compile(r"\d\.\d|\de-\d|\d,\d{3}")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
ABOUT = """\
The sections of these pages with tables of measured values. Date and commit are those at which the newest row was first
on any page with these numbers: a sentence that was changed later, or a table that was moved, does not count. The
sections name the commands, those of [the benchmarks](benchmarks.md) and [the study](study.md) at the top of the page.
The machine is two cores of an AMD EPYC or of an Intel Xeon with AVX-512, with 24 GiB of memory and no GPU, unless a
section names another; those with times that are compared across tables name which. Written by `python -m
benchmarks.measured_tables`."""

Numbers = tuple[str, ...]  # of a row


def numbers_of(row: str) -> Numbers:
    """Return the numbers of a row of a table, () if none is a measured value."""
    return tuple(NUMBER.findall(row)) if VALUE.search(row) else ()


def measured(page: Path) -> Iterator[tuple[str, list[Numbers]]]:
    """Yield every section with measured values, and the numbers of the rows of its tables.

    Where a section links to CSV files of docs/tables, these are its tables.
    """
    lines = page.read_text(encoding="utf-8").split("\n")
    starts = [0, *(at for at, line in enumerate(lines) if re.match("#+ ", line)), len(lines)]
    for first, end in itertools.pairwise(starts):
        section = lines[first:end]
        files = re.findall(r"\((tables/\S+\.csv)\)", "\n".join(section))
        rows = [row for file in files for row in (DOCS / file).read_text(encoding="utf-8").splitlines()]
        found = [numbers_of(row) for row in rows or section if files or row.startswith("|")]
        if any(found):
            yield section[0].lstrip("# "), [numbers for numbers in found if numbers]


def first_commits() -> dict[Numbers, tuple[int, str]]:
    """Return the first commit with these numbers in a row of a page or CSV file: its count, and "date | commit"."""
    first, commit = dict[Numbers, tuple[int, str]](), (0, "")
    log = _git("log", "--reverse", "--unified=0", "-p", "--format=%x00%cs | %h", "--", "*.md", "*.csv")
    for line in log.split("\n"):
        if line.startswith("\0"):
            commit = commit[0] + 1, line[1:]
        elif line.startswith("+"):
            first.setdefault(numbers_of(line), commit)
    return first


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=DOCS.parent, check=True, capture_output=True, text=True).stdout


def main() -> None:
    first = first_commits()
    rows = [
        f"| [{page.stem}]({page.name}) | {title} | {max(first[numbers] for numbers in measured_rows)[1]} |"
        for page in sorted(DOCS.glob("*.md"))
        if page != PAGE and page.stem not in OTHERS
        for title, measured_rows in measured(page)
        if title not in OTHER_SECTIONS
    ]
    head = ("| page | section | date | commit |", "|---|---|---|---|")
    PAGE.write_text("\n".join(("# Measurements", "", ABOUT, "", *head, *rows)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
