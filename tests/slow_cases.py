"""Parameters of tests of which most run under the marker slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, all but those in `quick` marked slow."""
    found = list(cases)
    assert all(case in found for case in quick)
    return [case if case in quick else _slow(case) for case in found]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
