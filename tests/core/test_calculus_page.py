"""The examples of docs/calculus.md."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "calculus.md"


def test_the_page_on_calculus_runs() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0


def test_it_is_linked() -> None:
    assert "\ncalculus\n" in PAGE.with_name("index.md").read_text(encoding="utf-8")
