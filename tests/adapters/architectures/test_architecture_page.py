"""The page of architectures shows every model, and what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow_cases import mostly_slow

pytest.importorskip("torch")
pytest.importorskip("architecture_models")

REASONS = ("equal", "not bilinear", "norms stay", "other parts", "latent")  # the page says what they mean


def test_the_page_shows_every_model_and_every_cell_is_green() -> None:
    import architecture_table as table
    from transformers_models import MODELS

    text = table.PAGE.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    header, _, *models_shown = rows
    assert header[-len(table.MEASURES) :] == list(table.MEASURES)
    assert [row[0] for row in models_shown] == sorted(MODELS)
    for row in models_shown:
        for cell in row[-len(table.MEASURES) :]:
            assert cell in REASONS or float(cell) < table.GREEN, row


@pytest.mark.parametrize("name", mostly_slow(["qwen3", "gemma2", "falcon_alibi", "vit"], ["qwen3"]))
def test_the_page_is_what_is_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import architecture_table as table

    monkeypatch.setattr(
        table, "METHODS", {"heads": table.METHODS["heads"]}
    )  # the others take long, and have tests of their own
    text = table.page({name: table.make_case(name, tmp_path)})
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    described = line.split("|")[:5]
    assert any(shown.split("|")[:5] == described for shown in table.PAGE.read_text(encoding="utf-8").splitlines())
    assert "**" not in line  # nothing misses
    assert without_rows(text) == without_rows(table.PAGE.read_text(encoding="utf-8"))


def without_rows(page: str) -> list[str]:
    return [line for line in page.splitlines() if not line.startswith("|")]
