"""Progress bars: what a stage shows of its time and its part."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tnlib_adapters
from compressed_folders import by_options, few_steps
from tnlib_adapters.compression.progress import Stage, State, progress_bars


def test_a_stage_states_its_part_and_its_memory() -> None:
    state = State(began=0.0, first=0)
    state.update(Stage("collecting", "block 7 of 22"), 4, 20, 8.0)
    assert state.part == "block 7 of 22"
    assert state.memory > 0
    state.update("collecting", 20, 20, 40.0)
    assert state.part == "20/20"


def test_bars_show_the_part_of_a_stage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    checks = []
    with progress_bars(lambda: checks.append(True)) as show:
        show(Stage("collecting statistics", "block 7 of 22"), 1, 44)
        show(Stage("collecting statistics", "block 7 of 22"), 2, 44)
    shown = capsys.readouterr().err
    assert "collecting statistics" in shown
    assert "block 7 of 22" in shown
    assert "left" in shown
    assert "GB" in shown
    assert " 0.0 GB" not in shown  # a frame before the first step
    assert re.search(r"-\d+:\d\d:\d\d", shown) is None
    assert len(checks) == 2


def test_without_a_terminal_every_block_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars(lambda: None) as show:
        for step in range(8):
            show(Stage("collecting statistics", f"block {4 - step // 2} of 4"), step, 8)
        show("collecting statistics", 8, 8)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    for number, line in zip((4, 3, 2, 1), lines[:4], strict=True):
        assert line.startswith("0:00:0")
        assert all(word in line for word in ("collecting statistics", f"block {number} of 4", "left", "GB"))
    assert "8/8" in lines[-1]


def test_statistics_count_blocks(
    folders: Any, text: Path, monkeypatch: pytest.MonkeyPatch, without_pictures: None
) -> None:
    few_steps(monkeypatch, 1)
    calls: list[tuple[Stage, int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        tnlib_adapters.compress(
            folders["llama"],
            Path(folder) / "out",
            **by_options(
                keep=0.5,
                calibrate=text,
                progress=lambda stage, *steps: calls.append((Stage(stage, getattr(stage, "detail", "")), *steps)),
            ),
        )
    for name in ("running the model", "collecting statistics"):
        own = [call for call in calls if call[0] == name]
        assert [done for _, done, _ in own] == sorted(done for _, done, _ in own)
        assert own[-1][1] == own[-1][2]
        assert {total for _, _, total in own} == {own[-1][2]}
        assert {"block 1 of 2", "block 2 of 2"} <= {stage.detail for stage, _, _ in own}
