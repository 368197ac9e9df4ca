"""Options and notes of the timed tests; `make bench` runs them, `make test` does not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cases import SCALES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--scale", choices=SCALES, default="small", help="Sizes of the inputs.")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # the name of a machine is nobody's business


def pytest_benchmark_generate_commit_info() -> dict[str, Any]:
    return {}
