"""Fixtures of the compression tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compressed_folders import few_steps


@pytest.fixture
def fit_in_few_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit every block in the `FIT_STEPS` of the module, or in two steps."""
    few_steps(monkeypatch, getattr(request.module, "FIT_STEPS", 2))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for OUT, so that whatever is left beside it is seen."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture
def folder_of(saved: Any) -> Callable[[str], Path]:
    """Name of a model -> its folder; "builtin" is the built-in one."""
    from tnlib_adapters import builtin_path

    return lambda name: builtin_path() if name == "builtin" else saved(name)[1]
