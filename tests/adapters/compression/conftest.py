"""Fixtures of the compression tests."""

from __future__ import annotations

import pytest
from compressed_folders import few_steps


@pytest.fixture
def fit_in_few_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit every block in the `FIT_STEPS` of the module, or in two steps."""
    few_steps(monkeypatch, getattr(request.module, "FIT_STEPS", 2))
