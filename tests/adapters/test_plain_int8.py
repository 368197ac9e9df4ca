"""Plain rounding beside a compression: what it takes, what it costs on text, and which of the two is said to win."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import tnlib_adapters  # noqa: E402
import tnlib_adapters.transformers_plugin  # noqa: E402  # registers the layout
from tnlib_adapters import evaluate, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.report.report import verdict  # noqa: E402
from tnlib_adapters.compression.sizes import plain_bytes, round_weights  # noqa: E402
from tnlib_adapters.instrument.running_model import open_running  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")
NAMES = ("bert", "gpt2_lm", "llama")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tnlib_adapters.compression.calibration.calibrate._STEPS", 5)


@pytest.mark.parametrize("name", NAMES)
def test_its_bytes_are_those_of_the_folder_that_holds_it(name: str, folders: Any, tmp_path: Path) -> None:
    report = tnlib_adapters.compress(folders[name], tmp_path / "out", keep=1, method="matrix", store="int8")
    assert report.plain_bytes == plain_bytes(open_checkpoint(folders[name]))
    assert report.bytes_after["attention"] == report.plain_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_rounded_model_is_the_folder_in_int8(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    tnlib_adapters.compress(folders[name], tmp_path / "out", keep=1, method="matrix", store="int8")
    rounded, stored = round_weights(open_running(folders[name])), open_running(tmp_path / "out")
    batch = rounded.batches(text.read_text())[0]
    with torch.no_grad():
        one, two, before = (model(batch) for model in (rounded, stored, open_running(folders[name])))
    assert float((one - two).norm() / one.norm()) <= 1e-5
    assert float((one - before).norm() / one.norm()) > 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_calibrated_factors_in_int8(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    made = {
        store: tnlib_adapters.compress(folders[name], tmp_path / store, keep=0.6, calibrate=text, store=store)
        for store in ("float", "int8")
    }
    assert made["int8"].n_after == made["float"].n_after
    assert made["int8"].bytes_after["attention"] < made["float"].bytes_after["attention"] / 2
    apart = evaluate(tmp_path / "float", tmp_path / "int8", text).error
    off = evaluate(folders[name], tmp_path / "float", text).error
    assert 0 < apart < 0.1 * off, "rounding costs next to nothing beside truncation"
    for report in made.values():
        assert report.plain_measured is not None
        assert report.measured is not None
        assert report.plain_measured < report.measured
        said = verdict(report)
        assert said is not None
        assert f"{report.plain_bytes / 1e6:.2f} MB" in said


def test_who_wins(folders: Any, tmp_path: Path) -> None:
    report = tnlib_adapters.compress(folders["bert"], tmp_path / "out", keep=0.5)
    assert verdict(report) is None  # nothing was measured on text

    def of(n_bytes: int, measured: float, store: str = "float") -> str:
        changed = dataclasses.replace(
            report, bytes_after={"attention": n_bytes, "other": 0}, measured=measured, plain_measured=0.1,
            plain_bytes=100, store=store,
        )  # fmt: skip
        return str(verdict(changed))

    assert of(50, 0.05).endswith("this is smaller and nearer to the original")
    assert of(50, 0.2).endswith("this is smaller, plain int8 nearer to the original")
    assert of(200, 0.05).endswith("this is nearer to the original, plain int8 smaller")
    assert of(200, 0.2).endswith("prefer it, or store these factors in it")
    assert of(200, 0.2, "int8").endswith("prefer it")
