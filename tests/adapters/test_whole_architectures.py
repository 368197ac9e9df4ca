"""All of a model of every architecture that reads text, by what a text shows: the folder is the model it says it is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from oracles import refused  # noqa: E402
from running_models import save_with_tokenizer  # noqa: E402
from tnlib_adapters import open_checkpoint  # noqa: E402
from tnlib_adapters.compression.compare.on_text import compare_on_text  # noqa: E402
from tnlib_adapters.compression.methods.other_matrices import names_of  # noqa: E402
from transformers_models import MODELS, inputs, loaded_like, outputs, random_model  # noqa: E402

from tnlib import ArgumentError  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")
LEFT_OUT = ("vit", "qwen2", "qwen2_window")  # no text; a tokenizer of its own kind, to which made-up words are nothing
EXPERTS = ("mixtral", "qwen3_moe", "qwen3_moe_normalised")  # which are not compressed
LATENT = ("deepseek_v2", "deepseek_v2_direct", "deepseek_v3", "deepseek_v3_halves")  # attention is of low rank already
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


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [name for name in MODELS if name not in (*LEFT_OUT, *EXPERTS, *LATENT)],
        ("bert", "gpt2_lm", "llama", "opt_narrow", "phi3"),
    ),
)
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


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_stay(name: str, text: Path, tmp_path: Path) -> None:
    """The attention is compressed on a text; experts are refused by name, and written as they are."""
    model = random_model(name)
    folder = save_with_tokenizer(model, tmp_path / "model")
    for what in ("mlp", "all"):
        with refused(ArgumentError, "compress: what must be 'attention'", "5 experts a layer", ".experts.0."):
            tnlib_adapters.compress(folder, tmp_path / "none", keep=0.6, what=what, method="matrix")
    report = tnlib_adapters.compress(folder, tmp_path / "small", keep=0.6, calibrate=text)
    assert 0.59 <= report.kept <= 0.6
    x, small = inputs(model), loaded_like(model, tmp_path / "small")
    wanted = outputs(small, x)
    assert np.abs(wanted - outputs(model, x)).max() > 1e-4 * np.abs(wanted).max()
    small.dequantize().save_pretrained(tmp_path / "dense")
    again = outputs(loaded_like(model, tmp_path / "dense"), x)
    np.testing.assert_allclose(again, wanted, atol=1e-4 * np.abs(wanted).max())
    before, after = (open_checkpoint(path).folder.tensors for path in (folder, tmp_path / "small"))
    for tensor in (name for name in before if ".experts." in name or name.endswith(".gate.weight")):
        np.testing.assert_array_equal(after[tensor].read(), before[tensor].read())


@pytest.mark.parametrize("name", LATENT[1:3])
def test_attention_on_latent_vectors_stays(name: str, text: Path, tmp_path: Path) -> None:
    """The feed-forward layers are compressed, with and without a text; the attention is refused by name."""
    model = random_model(name)
    folder = save_with_tokenizer(model, tmp_path / "model")
    for what in ("attention", "all"):
        with refused(ArgumentError, "compress: attention", model.config.model_type, "low rank already", "what='mlp'"):
            tnlib_adapters.compress(folder, tmp_path / "none", keep=0.6, what=what, method="matrix")
    checkpoint = open_checkpoint(folder)
    for compared in (tnlib_adapters.compare, functools.partial(compare_on_text, text=text.read_text())):
        with refused(ArgumentError, "compare: attention", model.config.model_type, "low rank already"):
            compared(checkpoint, [0.5])
    x = inputs(model)
    for out, options in ((tmp_path / "plain", {"method": "matrix"}), (tmp_path / "text", {"calibrate": text})):
        assert 0.59 <= tnlib_adapters.compress(folder, out, keep=0.6, what="mlp", **options).kept <= 0.6
        small = loaded_like(model, out)
        wanted = outputs(small, x)
        assert np.abs(wanted - outputs(model, x)).max() > 1e-4 * np.abs(wanted).max()
        small.dequantize().save_pretrained(tmp_path / "dense" / out.name)
        again = outputs(loaded_like(model, tmp_path / "dense" / out.name), x)
        np.testing.assert_allclose(again, wanted, atol=1e-4 * np.abs(wanted).max())


def test_tables_of_several_modules_stay(folders: Any) -> None:
    checkpoint = open_checkpoint(folders["t5_encoder"])
    assert names_of(checkpoint, "all") == names_of(checkpoint, "mlp")


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
