"""The study of compression: which rows it has, where its table goes, and how its picture names lines."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tnlib_adapters.compression.request import WHAT

from benchmarks import calibrated, study_picture

HEAD = "| method | keep | text | seed | manuals: cosine, mean | manuals: cosine, worst |"
ROWS = [
    "| heads | 0.5 | both | 0 | 0.9 | 0.5 |",
    "| heads | 0.25 | both | 0 | 0.8 | 0.4 |",
    "| heads fitted | 0.5 | both | 0 | 0.98 | 0.9 |",
    "| heads fitted | 0.5 | both | 1 | 0.96 | 0.8 |",
    "| heads fitted | 0.5 | docstrings | 0 | 0.1 | 0.1 |",
]


def test_every_method_comes_once_and_one_of_them_with_every_seed_and_text() -> None:
    methods, texts, seeds = tuple(calibrated.METHODS), ("both", "docstrings"), (0, 1, 2)
    rows = list(calibrated.rows_of(methods, texts, seeds))
    assert len(rows) == len(set(rows))
    for method in methods:
        own = {(text, seed) for name, text, seed in rows if name == method}
        repeated = {("both", 0), ("both", 1), ("both", 2), ("docstrings", 0)}
        assert own == (repeated if method == calibrated.REPEATED else {("both", 0)})
    assert [name for name, *_ in rows] == sorted((name for name, *_ in rows), key=methods.index)


def test_every_method_has_a_line_of_its_own_in_the_picture() -> None:
    assert study_picture.STYLES.keys() == calibrated.METHODS.keys()
    looks = [(str(one["color"]), one["marker"]) for one in study_picture.STYLES.values()]
    assert len(set(looks)) == len(looks)


def test_whole_models_are_compressed_by_methods_that_there_are() -> None:
    for what in WHAT:
        assert calibrated.REPEATED in calibrated.runs_of(what).keys() <= calibrated.METHODS.keys()
    assert calibrated.BEYOND.keys() == calibrated.HEADINGS.keys()


@pytest.mark.parametrize("heading", [*calibrated.HEADINGS.values(), *calibrated.BEYOND.values()])
def test_every_table_has_its_place(heading: str) -> None:
    lines = calibrated.STUDY.read_text(encoding="utf-8").splitlines()
    own = lines[lines.index(heading) + 1 :]
    end = next((k for k, line in enumerate(own) if line.startswith("## ")), len(own))
    assert [line for line in own[:end] if line.startswith(("| method |", "| what |"))]


@pytest.mark.parametrize("seed", range(5))
def test_names_move_apart_in_their_order(seed: int) -> None:
    values = (10 ** np.random.default_rng(seed).uniform(-3, 0, 10)).tolist()
    moved = study_picture.spread(values, 1.2)
    assert np.argsort(values).tolist() == np.argsort(moved).tolist()
    assert all(other / one >= 1.2 * (1 - 1e-3) for one, other in pairwise(sorted(moved)))
    assert study_picture.spread([0.01, 0.1], 1.2) == [0.01, 0.1]


def test_the_picture_shows_means_over_seeds_of_one_text() -> None:
    page = "\n".join(["# Study", "", HEAD, "|---|---|---|---|---|---|", *ROWS, "", "| method | keep |"])
    lines = study_picture.lines_of(study_picture.read_table(page), "manuals: cosine, mean")
    assert lines.keys() == {"heads", "heads fitted"}
    assert list(lines["heads"]) == [0.25, 0.5]
    assert lines["heads"][0.25] == pytest.approx(0.2)
    assert lines["heads fitted"] == pytest.approx({0.5: 0.03})


def test_a_table_takes_the_place_of_the_one_under_its_heading(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "study.md"
    first, second = (calibrated.HEADINGS[name] for name in ("minilm", "llama"))
    table = [HEAD, "|---|"]
    before = ["# Study", "", first, "", *table, *ROWS, "", "words", "", second, "", *table]
    page.write_text("\n".join([*before, ROWS[0], "", "end"]) + "\n", encoding="utf-8")
    monkeypatch.setattr(calibrated, "STUDY", page)
    calibrated.write_table(second, [*table, *ROWS[1:]])
    assert page.read_text(encoding="utf-8").splitlines() == [*before, *ROWS[1:], "", "end"]
