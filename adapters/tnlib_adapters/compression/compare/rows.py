"""Write rows of a comparison as CSV, and group them for the terminal."""

from __future__ import annotations

import csv
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")
Table = tuple[str, list[str], list[list[list[str]]]]  # title, columns, groups of rows of cells


def write_rows(file: Path, kind: type, rows: Sequence[Any]) -> None:
    """Write one line per row, with a header of field names."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow([field.name for field in fields(kind)])
        writer.writerows(astuple(row) for row in rows)


def grouped(
    rows: Sequence[Row], group: Callable[[Row], Hashable], cells: Callable[[Row], list[str]]
) -> list[list[list[str]]]:
    """Return the cells of all rows by group, groups in order of first appearance."""
    groups: dict[Hashable, list[list[str]]] = {}
    for row in rows:
        groups.setdefault(group(row), []).append(cells(row))
    return list(groups.values())
