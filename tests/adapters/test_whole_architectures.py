"""All of a model of every architecture that reads text, by what a text shows: the folder is the model it says it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from running_models import save_with_tokenizer  # noqa: E402
from tnlib_adapters import open_checkpoint  # noqa: E402
from tnlib_adapters.compression.methods.other_matrices import names_of  # noqa: E402
from transformers_models import MODELS, inputs, loaded_like, outputs, random_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")
LEFT_OUT = ("vit", "qwen2", "qwen2_window")  # no text; a tokenizer of its own kind, to which made-up words are nothing
SCALED = ("gemma", "gemma2", "gemma3")  # what they look up is multiplied by sqrt(d_model), in a module of another kind


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tnlib_adapters.compression.calibration.calibrate._STEPS", 2)


def check(model: Any, folder: Path, text: Path, out: Path) -> None:
    """Compress all of a model; reloaded, saved again and multiplied out it computes the same."""
    report = tnlib_adapters.compress(folder, out / "small", keep=0.6, what="all", calibrate=text)
    assert 0.59 <= report.kept <= 0.6
    x = inputs(model)
    small = loaded_like(model, out / "small")
    wanted = outputs(small, x)
    size = np.abs(wanted).max()
    assert np.abs(wanted - outputs(model, x)).max() > 1e-4 * size
    small.save_pretrained(out / "again")
    np.testing.assert_allclose(outputs(loaded_like(model, out / "again"), x), wanted, atol=1e-5 * size)
    small.dequantize().save_pretrained(out / "dense")
    np.testing.assert_allclose(outputs(loaded_like(model, out / "dense"), x), wanted, atol=1e-4 * size)
    tnlib_adapters.compress(folder, out / "multiplied", keep=0.6, what="all", calibrate=text, layout="dense")
    np.testing.assert_allclose(outputs(loaded_like(model, out / "multiplied"), x), wanted, atol=1e-4 * size)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LEFT_OUT])
def test_all_of_a_model(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    check(random_model(name), folders[name], text, tmp_path)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_tables_stay(name: str, text: Path, tmp_path: Path) -> None:
    model = random_model(name)
    config = model.config
    config.tie_word_embeddings = False
    untied = type(model)(config).eval()
    folder = save_with_tokenizer(untied, tmp_path / "untied")
    checkpoint = open_checkpoint(folder)
    assert names_of(checkpoint, "all") == names_of(checkpoint, "mlp")
    check(untied, folder, text, tmp_path)


@pytest.mark.parametrize("name", ["bert_masked", "roberta"])
def test_tables_that_predict_masked_words_stay(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folders[name])
    heads = [n for n in checkpoint.folder.tensors if n.startswith(("cls.", "lm_head."))]
    assert bool(heads) == (names_of(checkpoint, "all") == names_of(checkpoint, "mlp"))


def test_without_a_head_predictions_do_not_count(folders: Any, text: Path, tmp_path: Path) -> None:
    """A head that is not in the folder would be made at random, another one every time."""
    reports = [
        tnlib_adapters.compress(folders["llama_base"], tmp_path / f"{k}", keep=0.5, calibrate=text) for k in range(2)
    ]
    assert [report.measure for report in reports] == ["1 - cosine"] * 2
    assert reports[0].measured == reports[1].measured


def test_nearly_nothing_is_kept(folders: Any, text: Path, tmp_path: Path) -> None:
    """Values that are truncated to nothing leave nothing to refit the output weights to."""
    for name in ("gpt_neox", "llama"):
        for keep in (0.05, 0.08, 0.11):
            out = tmp_path / f"{name}-{keep}"
            report = tnlib_adapters.compress(folders[name], out, keep=keep, what="all", calibrate=text)
            assert report.kept <= keep
            assert np.isfinite(list(report.quality.values())).all()
