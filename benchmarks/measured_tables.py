"""Page of all tables of measured values: where they are, and when they were written.

    python -m benchmarks.measured_tables

writes docs/measurements.md from the pages and their history.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "measurements.md"
OTHERS = {"choose", "gallery", "conventions", "stability"}  # pages whose tables have no measured values
VALUE = re.compile(r"\d\.\d")
ABOUT = """\
The sections of these pages with tables of measured values, and date and commit of their newest row. The sections name
the commands, those of [the benchmarks](benchmarks.md) and [the study](study.md) at the top of the page. The machine is
two cores of an AMD EPYC with 24 GiB of memory and no GPU, unless a section names another. Written by `python -m
benchmarks.measured_tables` from the history of the pages."""


def measured(page: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield every section with measured values, and the numbers of the lines of its tables, from 1."""
    lines = page.read_text(encoding="utf-8").split("\n")
    starts = [0, *(at for at, line in enumerate(lines) if re.match("#+ ", line)), len(lines)]
    for first, end in itertools.pairwise(starts):
        rows = [at for at in range(first, end) if lines[at].startswith("|")]
        if any(VALUE.search(lines[at]) for at in rows):
            yield lines[first].lstrip("# "), [at + 1 for at in rows]


def written(page: Path, lines: list[int]) -> str:
    """Return date and commit of the newest of these lines, wherever they were before they were moved."""
    places = [f"-L{line},{line}" for line in lines]
    commits = set(re.findall(r"^([0-9a-f]{40}) ", _git("blame", "-wCC", "--line-porcelain", *places, page.name), re.M))
    return max(_git("show", "-s", "--format=%cs | %h", commit).strip() for commit in commits)


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=DOCS, check=True, capture_output=True, text=True).stdout


def main() -> None:
    rows = [
        f"| [{page.stem}]({page.name}) | {title} | {written(page, lines)} |"
        for page in sorted(DOCS.glob("*.md"))
        if page != PAGE and page.stem not in OTHERS
        for title, lines in measured(page)
    ]
    head = ("| page | section | date | commit |", "|---|---|---|---|")
    PAGE.write_text("\n".join(("# Measurements", "", ABOUT, "", *head, *rows)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
