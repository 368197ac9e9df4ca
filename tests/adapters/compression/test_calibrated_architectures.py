"""Calibration where heads stand in an order of their own, know distance by slopes, or norm their queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import few_steps, read_config, read_tensors
from oracles import assert_close, refused

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tnlib_adapters.transformers_plugin")

from tnlib_adapters import compress  # noqa: E402
from tnlib_adapters.compression.evaluation.evaluate import evaluate  # noqa: E402
from tnlib_adapters.transformers_plugin import FactoredLinear  # noqa: E402
from transformers_models import inputs, loaded_like, made_up_text, outputs, save_with_tokenizer  # noqa: E402  # noqa: E402

from tnlib import ArgumentError  # noqa: E402


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    few_steps(monkeypatch, 8)
    file = tmp_path / "text.txt"
    file.write_text(made_up_text(40), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["gpt_neox", "falcon_new", "falcon_alibi", "bloom", "qwen3_biases"])
def test_a_text_helps_and_factors_compute_what_their_product_does(
    name: str, saved: Callable[[str], tuple[Any, Path]], text: Path, tmp_path: Path, without_pictures: None
) -> None:
    model, _ = saved(name)
    source = save_with_tokenizer(model, tmp_path / "in")
    for out, options in (("plain", {}), ("calibrated", {"calibrate": text})):
        report = compress(source, tmp_path / out, keep=0.6, **options)
        assert 0.59 <= report.kept <= 0.6
    before, after = (
        sum(tensor.values.size for tensor in read_tensors(folder).values())
        for folder in (source, tmp_path / "calibrated")
    )
    assert after - before == report.n_after - report.n_before - _unit_rows(tmp_path / "calibrated")

    factored, x = loaded_like(model, tmp_path / "calibrated"), inputs(model)
    got = outputs(factored, x)
    assert sum(isinstance(module, FactoredLinear) for module in factored.modules()) == 8
    assert_close(got, outputs(factored.dequantize(), x), np.float32, factor=256)
    plain, calibrated = (evaluate(source, tmp_path / out, text).divergence for out in ("plain", "calibrated"))
    assert calibrated < 0.8 * plain


def _unit_rows(folder: Path) -> int:
    """Count the numbers that stand in config.json: which rows are unit rows."""
    layers = read_config(folder)["quantization_config"]["layers"]
    return sum(len(piece.get("rows", [])) for layer in layers for piece in layer)


def test_images_have_no_text(saved: Callable[[str], tuple[Any, Path]], text: Path, tmp_path: Path) -> None:
    with refused(ArgumentError, "compress", "must read text", "vit", "images"):
        compress(saved("vit")[1], tmp_path / "out", keep=0.5, calibrate=text)
    assert not (tmp_path / "out").exists()
