"""Every method at several fractions: rows, what is refused, the table on disk and the picture."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import builtin_copy, change_config, change_tensors
from oracles import refused
from tnlib_adapters import builtin_path, compress, open_checkpoint
from tnlib_adapters.compression.compare.by_layer import Comparison, Row, compare
from tnlib_adapters.compression.compare.comparison_folder import draw_by_layer
from tnlib_adapters.compression.methods.table import METHODS

from tnlib import ArgumentError

COLUMNS = ["method", "keep", "layer", "qk_error", "ov_error", "n_before", "n_after", "seconds"]


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(open_checkpoint(builtin_path()), [0.75, 0.25])


def test_one_row_per_method_fraction_and_layer(found: Comparison) -> None:
    wanted = [(method, keep, layer) for method in METHODS for keep in (0.75, 0.25) for layer in range(2)]
    assert [(row.method, row.keep, row.layer) for row in found.rows] == wanted
    assert found.refused == {}


def test_numbers_keep_their_promise(found: Comparison) -> None:
    for method in METHODS:
        for keep in (0.75, 0.25):
            mine = [row for row in found.rows if (row.method, row.keep) == (method, keep)]
            before, after = (sum(getattr(row, name) for row in mine) for name in ("n_before", "n_after"))
            assert before == 2 * 4 * 64 * 65
            assert (keep - 0.01) * before <= after <= keep * before
            assert all(row.seconds > 0 for row in mine)


def test_less_kept_is_more_error(found: Comparison) -> None:
    for method in METHODS:
        mean = {
            keep: np.mean([r.qk_error**2 + r.ov_error**2 for r in found.rows if (r.method, r.keep) == (method, keep)])
            for keep in (0.75, 0.25)
        }
        assert 0 < mean[0.75] < mean[0.25] < 2


@pytest.mark.parametrize("name", ["builtin", "gpt2_lm"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("without_pictures")
def test_errors_are_those_that_compress_writes(method: str, name: str, saved: Any, tmp_path: Path) -> None:
    """Factors of float32 are written as they are, so the two agree to the last bits."""
    source = builtin_path() if name == "builtin" else saved(name)[1]
    rows = compare(open_checkpoint(source), [0.5], [method]).rows
    report = compress(source, tmp_path / "out", keep=0.5, method=method)
    for row, layer in zip(rows, report.layers, strict=True):
        assert (row.layer, row.n_before, row.n_after) == (layer.layer, layer.n_before, layer.n_after)
        assert (row.qk_error, row.ov_error) == pytest.approx((layer.qk_error, layer.ov_error), rel=1e-9)


def test_only_what_was_asked_for() -> None:
    rows = compare(open_checkpoint(builtin_path()), [0.5], ["matrix", "heads"]).rows
    assert [row.method for row in rows] == ["matrix", "matrix", "heads", "heads"]


# ---------------------------------------------------------------------------------------------------------- refused


def prime(folder: Path) -> Path:
    builtin_copy(folder)
    change_tensors(
        folder,
        lambda tensors: tensors.update(
            {name: a[tuple(slice(61) if n == 64 else slice(None) for n in a.shape)] for name, a in tensors.items()}
        ),
    )
    change_config(folder, hidden_size=61, num_attention_heads=1)
    return folder


def test_what_a_model_cannot_run_is_left_out_with_the_reason(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(prime(tmp_path / "prime"))
    some = compare(checkpoint, [0.5])
    assert {row.method for row in some.rows} == set(METHODS) - {"ttm"}
    assert list(some.refused) == ["ttm"]
    assert "61 is prime" in some.refused["ttm"]
    with refused(ArgumentError, "'ttm'", "61 is prime"):
        compare(checkpoint, [0.5], ["heads", "ttm"])


def test_fractions_too_small_for_a_method_are_left_out_with_the_reason() -> None:
    some = compare(open_checkpoint(builtin_path()), [0.5, 0.03], ["matrix", "heads"])
    assert [(row.method, row.keep) for row in some.rows if row.layer == 0] == [
        ("matrix", 0.5),
        ("heads", 0.5),
        ("heads", 0.03),
    ]
    assert list(some.refused) == ["matrix at 0.03"]
    assert "at least 0.04" in some.refused["matrix at 0.03"]


@pytest.mark.parametrize("keeps", [[0.5, 0], [1.5], ["0.5"], [float("nan")]])
def test_no_fractions_are_refused(keeps: list[Any]) -> None:
    with refused(ArgumentError, "keep must lie in (0, 1]"):
        compare(open_checkpoint(builtin_path()), keeps)


def test_nothing_to_compare_is_refused() -> None:
    with refused(ArgumentError, "compare", "at least"):
        compare(open_checkpoint(builtin_path()), [0.001])
    with refused(ArgumentError, "compare"):
        compare(open_checkpoint(builtin_path()), [])


def test_unknown_methods_are_refused() -> None:
    with refused(ArgumentError, "'fourier'"):
        compare(open_checkpoint(builtin_path()), [0.5], ["heads", "fourier"])


@pytest.mark.usefixtures("without_pictures")
def test_a_compressed_checkpoint_is_refused(tmp_path: Path) -> None:
    compress(builtin_path(), tmp_path / "out", keep=0.5)
    with refused(ArgumentError, "compressed already"):
        compare(open_checkpoint(tmp_path / "out"), [0.5])


# -------------------------------------------------------------------------------------------------- table and picture


def test_csv(found: Comparison, tmp_path: Path) -> None:
    found.write_csv(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as opened:
        header, *lines = csv.reader(opened)
    assert header == COLUMNS
    kinds = (str, float, int, float, float, int, int, float)
    assert [Row(*(kind(cell) for kind, cell in zip(kinds, line, strict=True))) for line in lines] == found.rows
    assert (tmp_path / "table.csv").read_bytes().count(b"\n") == len(found.rows) + 1


def test_the_picture_shows_every_method(found: Comparison) -> None:
    figure = draw_by_layer(found)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(METHODS)
    for ax, name in zip(figure.axes, ("qk_error", "ov_error"), strict=True):
        lines = {line.get_label(): line for line in ax.lines if not str(line.get_label()).startswith("_")}
        for method, line in lines.items():
            mine = [row for row in found.rows if row.method == method]
            for keep, x, y in zip((0.25, 0.75), *line.get_data(), strict=True):
                some = [row for row in mine if row.keep == keep]
                assert x == pytest.approx(np.mean([row.n_after / row.n_before for row in some]))
                assert y == pytest.approx(np.mean([getattr(row, name) for row in some]))
        dots = sum(len(line.get_xdata()) for line in ax.lines if str(line.get_label()).startswith("_"))
        assert dots == len(found.rows)
    assert figure.axes[0].get_title() == "QK operators"


def test_the_picture_of_one_row() -> None:
    row = Row("heads", 0.5, 0, 0.1, 0.2, 100, 50, 0.01)
    out = io.BytesIO()
    draw_by_layer(Comparison([row], {})).savefig(out, format="png")
    assert out.getvalue().startswith(b"\x89PNG\r\n")
