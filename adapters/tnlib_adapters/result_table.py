"""Base class of results that are tables: they print, show in notebooks, and become data frames of pandas."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from tnlib._html import facts, table
from tnlib._typing import Array
from tnlib._validate import import_optional

Columns: TypeAlias = dict[str, Sequence[Any] | Array]

_EACH = 4  # heads that are printed for every kind of score


class Table(ABC):
    """A result that prints as a table of its most important rows and becomes a data frame of all its rows.

    A subclass states a title and columns. Columns "layer" and "head" are printed as one, "layer.head".

    Examples
    --------
    >>> class Squares(Table):
    ...     _title = "Squares of two numbers"
    ...     def _columns(self, rows):
    ...         numbers = np.array([2, 3])[rows]
    ...         return {"number": numbers, "square": numbers**2.0}
    >>> Squares()
    Squares of two numbers
      number  square
           2   4.000
           3   9.000
    """

    _FORMATS: ClassVar[Mapping[str, str]] = {}  # of columns of numbers, where it is not .3f
    _HIDDEN: ClassVar[tuple[str, ...]] = ()  # columns of the data frame that are not printed
    _SHOWN: ClassVar[int | None] = None  # number of printed rows, None for all

    @property
    @abstractmethod
    def _title(self) -> str:
        """The first line."""

    @abstractmethod
    def _columns(self, rows: Any) -> Columns:
        """Return the columns at some rows, an array of their numbers or a slice."""

    def _printed(self) -> Array | slice:
        """Return the rows that are printed, in this order."""
        return slice(self._SHOWN)

    def _notes(self) -> Sequence[str]:
        """Return sentences below the table, those of an attribute `notes` unless a subclass has others."""
        return [f"note: {note}" for note in getattr(self, "notes", ())]

    def _picture(self) -> str:
        """Return the picture that a notebook shows, as HTML."""
        return ""

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame of all rows.

        Raises
        ------
        ModuleNotFoundError
            If pandas is not installed.
        """
        return data_frame(f"{type(self).__name__}.to_frame", self._columns(slice(None)))

    def __repr__(self) -> str:
        padded = []
        for name, cells, is_numeric in self._cells():
            width = max(map(len, (name, *cells)))
            padded.append([f"{cell:>{width}}" if is_numeric else f"{cell:{width}}" for cell in (name, *cells)])
        rows = ["  ".join(("", *row)).rstrip() for row in zip(*padded, strict=True)]
        return "\n".join([self._title, *rows, *self._notes()])

    def _repr_html_(self) -> str:
        columns = self._cells()
        body = table([name for name, *_ in columns], list(zip(*(cells for _, cells, _ in columns), strict=True)))
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return facts(self._title, {}, body + notes + self._picture())

    def _cells(self) -> list[tuple[str, list[str], bool]]:
        """Return of every printed column its heading, its cells, and whether these are numbers."""
        columns = {name: c for name, c in self._columns(self._printed()).items() if name not in self._HIDDEN}
        if "layer" in columns and "head" in columns:
            columns["head"] = [
                f"{layer}.{head}" for layer, head in zip(columns.pop("layer"), columns["head"], strict=True)
            ]
        return [
            (
                name.replace("_", " "),
                [_cell(value, self._FORMATS.get(name, "z.3f")) for value in values],
                all(isinstance(value, (int, float, np.number)) for value in values),
            )
            for name, values in columns.items()
        ]


class HeadTable(Table):
    """A table of all heads: scores of shape (layers, heads), the attributes that `_SCORES` names.

    The heads with the four largest scores of every kind are printed.
    """

    _SCORES: ClassVar[tuple[str, ...]]

    def _scores(self) -> dict[str, Array]:
        """Return the scores that were computed, by name."""
        return {name: getattr(self, name) for name in self._SCORES if getattr(self, name) is not None}

    def _columns(self, rows: Any) -> Columns:
        scores = self._scores()
        layer, head = np.indices(next(iter(scores.values())).shape).reshape(2, -1)[:, rows]
        return {"layer": layer, "head": head} | {name: values.ravel()[rows] for name, values in scores.items()}

    def _printed(self) -> Array:
        return np.unique([descending(values, _EACH) for values in self._scores().values()])


def _cell(value: Any, spec: str) -> str:
    """Return a number in a format, nothing for NaN, and what is not a floating-point number as it is."""
    if not isinstance(value, (float, np.floating)):
        return f"{value:,}" if isinstance(value, (int, np.integer)) else str(value)
    return "" if math.isnan(value) else format(float(value), spec)


def descending(values: Array, n: int | None = None) -> Array:
    """Return the flat indices of the n largest values, largest first and NaN last, equal ones in order.

    >>> descending(np.array([[1.0, np.nan], [3.0, 1.0]]), 3)
    array([2, 0, 3])
    """
    return np.asarray(np.argsort(-np.asarray(values), axis=None, kind="stable")[:n])


def data_frame(function: str, columns: Mapping[str, Any]) -> Any:
    """Return a pandas.DataFrame of these columns; `function` is named where pandas is not installed."""
    return import_optional(function, "pandas", "pandas").DataFrame(dict(columns))
