"""Methods side by side on a text: every row is what the folder that compress writes would be."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import tnlib_adapters
import tnlib_adapters.transformers_plugin  # registers the layout
from click.testing import CliRunner
from oracles import refused
from quick_compressions import few_steps
from running_models import made_up_text, save_with_tokenizer
from tnlib_adapters import cli, evaluate, open_checkpoint
from tnlib_adapters.compression.compare.comparison_folder import draw_on_text
from tnlib_adapters.compression.compare.on_text import ROUNDED, compare_on_text, comparison_rows
from tnlib_adapters.compression.text import hold_out

from tnlib import ArgumentError

pytestmark = pytest.mark.usefixtures("without_pictures")
NAMES = ("bert", "gpt2_lm", "llama")


@pytest.fixture(autouse=True)
def fit_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    few_steps(monkeypatch, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_what_compress_writes(name: str, folders: Any, tmp_path: Path) -> None:
    text, keep = made_up_text(), 0.5
    found = compare_on_text(open_checkpoint(folders[name]), [keep], text, bits=[6])
    assert not found.refused
    rows = {row.method: row for row in found.rows}
    assert list(rows) == [*ROUNDED, *comparison_rows()]
    file, held = tmp_path / "text.txt", tmp_path / "held.txt"
    file.write_text(text)
    held.write_text(hold_out(text)[1])
    for row_name, arguments in {
        "matrix": {"method": "matrix"},
        "heads": {},
        "matrix, whitened": {"method": "matrix", "calibrate": file},
        "heads, whitened": {"method": "heads", "calibrate": file},
        "tucker, whitened": {"method": "tucker", "calibrate": file},
        "calibrated": {"calibrate": file},
    }.items():
        row = rows[row_name]
        for store, n_bytes, error in (("float", row.n_bytes, row.error), ("int8", row.n_bytes_int8, row.error_int8)):
            out = tmp_path / f"{row_name}-{store}"
            report = tnlib_adapters.compress(folders[name], out, keep=keep, store=store, **arguments)
            assert report.kept == row.kept
            assert report.bytes_after["attention"] == n_bytes
            assert evaluate(folders[name], out, held).error == pytest.approx(error, rel=1e-2, abs=1e-6)
    assert found.bytes_before == report.bytes_before["attention"]
    report = tnlib_adapters.compress(folders[name], tmp_path / "quantized", bits=6, calibrate=file)
    assert rows["quantized"].n_bytes == report.bytes_after["attention"]
    assert rows["quantized"].error == pytest.approx(report.measured, rel=1e-2)
    assert rows["plain int8"].n_bytes == report.plain_bytes
    assert rows["GPTQ int4"].n_bytes == report.gptq_bytes
    assert rows["plain int8"].error == pytest.approx(report.plain_measured)
    assert 5 * rows["plain int8"].error < rows["GPTQ int4"].error


def test_some_methods_and_the_table(folders: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(made_up_text())
    result = CliRunner().invoke(
        cli.main,
        ["compare", str(folders["bert"]), "--calibrate", str(text), "--keep", "0.6", "--keep", "0.4",
         "--method", "matrix", "--out", str(tmp_path / "out")],
        env={"COLUMNS": "140"},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "1 - cosine on held-out text" in result.stdout
    with (tmp_path / "out/compare.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    assert [row["method"] for row in rows] == [*ROUNDED, *["matrix"] * 2, *["matrix, whitened"] * 2]
    for row in rows:
        assert f"{float(row['error']):.4f}" in result.stdout
    assert (tmp_path / "out/compare.png").stat().st_size > 10_000


def test_quantized_has_sizes_of_its_own(folders: Any) -> None:
    found = compare_on_text(open_checkpoint(folders["bert"]), [0.5], made_up_text(), ["quantized"], bits=[6, 0.3])
    rows = {row.method: row for row in found.rows}
    assert list(rows) == [*ROUNDED, "quantized"]
    assert rows["quantized"].keep == 1
    assert rows["quantized"].n_bytes_int8 is None
    assert rows["GPTQ int4"].n_bytes < rows["quantized"].n_bytes < rows["plain int8"].n_bytes
    assert "bits must be at least" in found.refused["quantized at 0.3"]
    numbers, sizes = draw_on_text(found).axes
    assert len(numbers.get_lines()) == 0
    assert "quantized" in [line.get_label() for line in sizes.get_lines()]
    with refused(ArgumentError, "compare: bits must lie in (0, 32]"):
        compare_on_text(open_checkpoint(folders["bert"]), [0.5], made_up_text(), bits=[0])


def test_the_picture_has_a_line_for_every_row(folders: Any) -> None:
    found = compare_on_text(open_checkpoint(folders["gpt2_lm"]), [0.6, 0.3], made_up_text(), ["matrix"])
    numbers, sizes = draw_on_text(found).axes
    assert [line.get_label() for line in numbers.get_lines()] == ["matrix", "matrix, whitened"]
    assert len(sizes.get_lines()) == 2 * 2 + 4
    assert found.measure == "divergence (nats a token)"


def test_what_is_off_is_refused(folders: Any) -> None:
    checkpoint = open_checkpoint(folders["bert"])
    wanted = "compare: with calibrate, method must be one of heads, matrix, ttm, tucker, "
    with refused(ArgumentError, wanted, "calibrated, quantized, got 'cp'"):
        compare_on_text(checkpoint, [0.5], made_up_text(), ["cp"])
    with refused(ArgumentError, "at least ten lines"):
        compare_on_text(checkpoint, [0.5], "w1 w2\nw3 w4\n")
    with refused(ArgumentError, "keep must lie in (0, 1]"):
        compare_on_text(checkpoint, [1.5], made_up_text())


def test_a_prime_width_leaves_out_what_cannot_split_it(tmp_path: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 13, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 20}
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
    checkpoint = open_checkpoint(save_with_tokenizer(model, tmp_path / "prime"))
    with refused(ArgumentError, "compare", "'ttm'", "13 is prime"):
        compare_on_text(checkpoint, [0.5], made_up_text(), ["ttm"])
    found = compare_on_text(checkpoint, [0.5], made_up_text())
    assert {name for name in found.refused if " at " not in name} == {"ttm", "ttm, whitened"}  # at any fraction
    assert "13 is prime" in found.refused["ttm, whitened"]
    assert "tucker, whitened" in {row.method for row in found.rows}
