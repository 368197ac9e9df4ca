"""Tables of results as data frames of pandas, which is imported when one is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tnlib._validate import import_optional


def data_frame(function: str, columns: Mapping[str, Any]) -> Any:
    """Return a pandas.DataFrame of these columns; `function` is named where pandas is not installed."""
    return import_optional(function, "pandas", "pandas").DataFrame(dict(columns))
