"""The rows of a comparison against compressions of the same model, and the files that show them."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import dense_layers, n_attention, relative
from oracles import refused
from random_checkpoints import random_folder
from tnlib_adapters import compress, open_checkpoint
from tnlib_adapters.compression.compare.by_layer import Comparison, compare
from tnlib_adapters.compression.compare.comparison_folder import draw_by_layer
from tnlib_adapters.compression.methods.table import METHODS

from tnlib import ArgumentError

HEADER = ["method", "keep", "layer", "qk_error", "ov_error", "n_before", "n_after", "seconds"]
KEEPS = [0.75, 0.4]
pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tmp_path_factory.mktemp("compare") / "in", d=32, n_heads=4, n_layers=3)


@pytest.fixture(scope="module")
def found(source: Path) -> Comparison:
    return compare(open_checkpoint(source), KEEPS)


def test_there_is_a_row_for_everything_that_was_not_refused(found: Comparison) -> None:
    seen = [(row.method, row.keep, row.layer) for row in found.rows]
    assert len(set(seen)) == len(seen)
    refusals = {tuple(what.split(" at ")) for what in found.refused}
    for method in METHODS:
        for keep in KEEPS:
            layers = [layer for m, k, layer in seen if (m, k) == (method, keep)]
            assert layers == ([] if (method, f"{keep:g}") in refusals else [0, 1, 2])
    assert {"heads", "matrix", "cp"} <= {row.method for row in found.rows}


def test_numbers_are_within_the_fraction(found: Comparison, source: Path) -> None:
    n_before = n_attention(source)
    for method, keep in {(row.method, row.keep) for row in found.rows}:
        rows = [row for row in found.rows if (row.method, row.keep) == (method, keep)]
        assert sum(row.n_before for row in rows) == n_before
        assert keep - 0.01 <= sum(row.n_after for row in rows) / n_before <= keep
        assert all(row.seconds > 0 for row in rows)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("method", ["heads", "matrix"])
def test_rows_agree_with_a_compression(
    method: str, keep: float, found: Comparison, source: Path, tmp_path: Path
) -> None:
    report = compress(source, tmp_path / "out", keep=keep, method=method, layout="dense")
    rows = [row for row in found.rows if (row.method, row.keep) == (method, keep)]
    layers = zip(dense_layers(source), dense_layers(tmp_path / "out"), strict=True)
    for row, one, (old, new) in zip(rows, report.layers, layers, strict=True):
        assert (row.layer, row.n_before, row.n_after) == (one.layer, one.n_before, one.n_after)
        assert row.qk_error == pytest.approx(one.qk_error, rel=1e-5, abs=1e-12)
        assert row.ov_error == pytest.approx(one.ov_error, rel=1e-5, abs=1e-12)
        for kind, said in enumerate((row.qk_error, row.ov_error)):
            a, b = np.stack(old.operators()[kind]), np.stack(new.operators()[kind])
            assert said == pytest.approx(relative(a, b), rel=1e-5, abs=1e-12)
            assert said < 1.5


def test_less_kept_errs_more(found: Comparison) -> None:
    total = {
        (method, keep): sum(
            row.qk_error**2 + row.ov_error**2 for row in found.rows if (row.method, row.keep) == (method, keep)
        )
        for method, keep in {(row.method, row.keep) for row in found.rows}
    }
    both = [method for method in METHODS if all((method, keep) in total for keep in KEEPS)]
    assert len(both) >= 3
    for method in both:
        assert total[method, 0.75] < total[method, 0.4]


def test_heads_truncate_operators_better_than_matrices(found: Comparison) -> None:
    """Of all factors of that many numbers per head, theirs are made for the operators."""
    mean = {m: np.mean([row.qk_error for row in found.rows if row.method == m]) for m in ("heads", "matrix")}
    assert mean["heads"] < mean["matrix"]


# -------------------------------------------------------------------------------------------------- table and picture


def test_the_table_reads_back(found: Comparison, tmp_path: Path) -> None:
    found.write_csv(tmp_path / "found.csv")
    raw = (tmp_path / "found.csv").read_bytes()
    header, *lines = csv.reader(io.StringIO(raw.decode("utf-8"), newline=""))
    assert header == HEADER
    assert len(lines) == len(found.rows)
    for line, row in zip(lines, found.rows, strict=True):
        kinds = (str, float, int, float, float, int, int, float)
        values = [kind(text) for kind, text in zip(kinds, line, strict=True)]
        assert values == [getattr(row, name) for name in HEADER]


def test_the_picture_is_one(found: Comparison, tmp_path: Path) -> None:
    from matplotlib.image import imread

    figure = draw_by_layer(found)
    figure.savefig(tmp_path / "found.png", dpi=60)
    raw = (tmp_path / "found.png").read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    image = imread(tmp_path / "found.png")
    assert image.ndim == 3
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 20
    labels = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert labels == {row.method for row in found.rows}
    drawn = {round(float(y), 9) for line in figure.axes[0].get_lines() for y in np.asarray(line.get_ydata())}
    assert {round(row.qk_error, 9) for row in found.rows} <= drawn


# ---------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_run_is_named_and_the_rest_is_measured(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(random_folder(tmp_path / "in", d=13, n_heads=1))
    found = compare(checkpoint, [1.0, 0.001])
    assert {row.method for row in found.rows} == set(METHODS) - {"ttm"}
    assert {row.keep for row in found.rows} == {1.0}
    assert "prime" in found.refused["ttm"]
    for method in set(METHODS) - {"ttm"}:
        assert f"{method} at 0.001" in found.refused
        assert "at least" in found.refused[f"{method} at 0.001"]


def test_a_method_that_was_asked_for_by_name_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(random_folder(tmp_path / "in", d=13, n_heads=1))
    with refused(ArgumentError, "'ttm'", "prime", "13"):
        compare(checkpoint, [1.0], ["heads", "ttm"])


def test_nothing_to_show_is_an_error(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    with refused(ArgumentError, "compare: ", "'heads'", "got 1e-05", "at least"):
        compare(checkpoint, [1e-5], ["heads"])
    with refused(ArgumentError, "compare: "):
        compare(checkpoint, [], ["heads"])


@pytest.mark.parametrize("keep", [0, -1, 1.5, float("nan"), "0.5", True])
def test_fractions_that_are_none(keep: Any, source: Path) -> None:
    with refused(ArgumentError, "keep", "(0, 1]", repr(keep)):
        compare(open_checkpoint(source), [0.5, keep], ["heads"])


def test_unknown_methods(source: Path) -> None:
    with refused(ArgumentError, "method", "'svd'", "heads, matrix, ttm, tucker, cp"):
        compare(open_checkpoint(source), [0.5], ["svd"])


def test_compressed_already(source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "out", keep=0.5)
    with refused(ArgumentError, "compressed already", str(tmp_path / "out")):
        compare(open_checkpoint(tmp_path / "out"), [0.5], ["heads"])


def test_progress_names_the_method(source: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    compare(open_checkpoint(source), [0.5], ["matrix"], lambda *step: seen.append(step))
    assert {stage.split(":")[0] for stage, _, _ in seen} == {"matrix"}
    assert [step[1:] for step in seen if "factorising" in step[0]] == [(k, 3) for k in range(4)]


def test_the_checkpoint_stays_as_it_was(source: Path) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    compare(open_checkpoint(source), [0.5], ["heads"])
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
