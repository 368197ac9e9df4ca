"""Compressions without their slow parts: pictures, measurements of the built-in model, most steps of the fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PAGE = "tnlib_adapters.compression.report.report_files.write_page"
_STAND_INS: dict[str, Callable[..., Any]] = {
    PAGE: lambda report, file: file.write_text("page", encoding="utf-8"),
    "tnlib_adapters.compression.compress.measure_quality": lambda before, after: {},
}


def leave_out_page(patch: pytest.MonkeyPatch) -> None:
    """Write a page without pictures, whose drawing takes most of the time of a small compression."""
    patch.setattr(PAGE, _STAND_INS[PAGE])


def leave_out_pictures(patch: pytest.MonkeyPatch) -> None:
    """Write a page without pictures, and do not measure the built-in model; the other files are as usual."""
    for name, stand_in in _STAND_INS.items():
        patch.setattr(name, stand_in)


def few_steps(patch: pytest.MonkeyPatch, n: int) -> None:
    """Fit every block in `n` steps."""
    for name in ("STEPS", "ROUNDED_STEPS"):
        patch.setattr(f"tnlib_adapters.compression.calibration.fit_by_block.{name}", n)
