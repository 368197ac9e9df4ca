"""An error to allow in the place of a fraction to keep: met by few numbers, predicted as it is measured, or refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import random_folder
from compressed_folders import n_attention
from oracles import refused
from tnlib_adapters import builtin_path, compress

from tnlib import ArgumentError

pytestmark = pytest.mark.usefixtures("without_pictures")
METHODS = ("heads", "matrix", "ttm", "tucker")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return random_folder(tmp_path / "in", d=24, n_heads=4, n_layers=2)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_predicted_is_measured(method: str, source: Path, tmp_path: Path) -> None:
    for name, folder in (("bert", source), ("builtin", builtin_path())):
        report = compress(folder, tmp_path / name, keep=0.5, method=method)
        assert report.measure == "relative error"
        assert report.predicted is not None
        assert report.measured == pytest.approx(report.predicted, rel=1e-3)
        assert 0 < report.measured < 1


@pytest.mark.parametrize("method", METHODS)
def test_the_curve_falls_and_passes_what_was_chosen(method: str, tmp_path: Path) -> None:
    report = compress(builtin_path(), tmp_path / "out", keep=0.5, method=method)
    kept, errors = report.curve["kept"], report.curve["predicted"]
    assert len(kept) == len(errors) > 5
    assert all(a < b for a, b in itertools.pairwise(kept))
    assert all(a >= b for a, b in itertools.pairwise(errors))
    assert kept[-1] <= 1
    assert report.predicted is not None
    above, below = (
        [e for k, e in zip(kept, errors, strict=True) if k < report.kept - 0.02],
        [e for k, e in zip(kept, errors, strict=True) if k > report.kept + 0.02],
    )
    assert min(above) > report.predicted > max(below)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("allowed", [0.6, 0.2, 0.02])
def test_the_smallest_size_within_an_error(method: str, allowed: float, tmp_path: Path) -> None:
    report = compress(builtin_path(), tmp_path / "out", max_error=allowed, method=method)
    assert (report.keep, report.max_error) == (None, allowed)
    assert report.predicted is not None
    assert report.measured is not None
    assert report.predicted <= allowed
    assert report.measured <= allowed * (1 + 1e-3)
    assert n_attention(tmp_path / "out") == report.n_after
    smaller = [
        e for k, e in zip(report.curve["kept"], report.curve["predicted"], strict=True) if k < report.kept - 0.02
    ]
    assert all(error > allowed for error in smaller), "fewer numbers would have done"


def test_no_error_at_all_keeps_what_there_is(source: Path, tmp_path: Path) -> None:
    report = compress(source, tmp_path / "out", max_error=0, method="matrix")
    assert report.kept == 1
    assert report.measured == 0


def test_a_budget_caps_an_error(tmp_path: Path) -> None:
    loose = compress(builtin_path(), tmp_path / "loose", max_error=0.3)
    both = compress(builtin_path(), tmp_path / "both", max_error=0.3, keep=0.9)
    assert both.n_after == loose.n_after
    assert both.keep == 0.9
    with refused(ArgumentError, "max_error=0.3 is reached by no allocation within 0.1", "the least is 0.", "keep more"):
        compress(builtin_path(), tmp_path / "out", max_error=0.3, keep=0.1)
    with refused(ArgumentError, "max_error=0.3 is reached by no allocation", "none fits at all"):
        compress(builtin_path(), tmp_path / "out", max_error=0.3, keep=0.001, method="matrix")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", True, 1j])
def test_errors_that_are_none(value: Any, tmp_path: Path) -> None:
    with refused(ArgumentError, "compress: max_error must be a number from 0 on", repr(value)):
        compress(builtin_path(), tmp_path / "out", max_error=value)


def test_neither_nor(tmp_path: Path) -> None:
    with refused(ArgumentError, "keep or max_error must be given"):
        compress(builtin_path(), tmp_path / "out")


def test_a_method_that_cannot_tell_says_so(tmp_path: Path) -> None:
    with refused(ArgumentError, "max_error cannot be met by method 'cp'"):
        compress(builtin_path(), tmp_path / "out", max_error=0.3, method="cp")
    report = compress(builtin_path(), tmp_path / "out", keep=0.1, method="cp")
    assert report.predicted is None
    assert report.measured is not None
    assert report.curve == {"kept": [], "predicted": []}
