"""All of a model of every architecture that reads text, by what a text shows: the folder is the model it says it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tnlib_adapters.transformers_plugin")

import tnlib_adapters  # noqa: E402
from compressed_folders import by_options  # noqa: E402
from oracles import refused  # noqa: E402
from tnlib_adapters import Budget, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.compressed_part import compressed_weights  # noqa: E402
from transformers_models import (  # noqa: E402
    MODELS,
    inputs,
    loaded_like,
    outputs,
    random_model,
    save_with_tokenizer,
)

from tnlib import ArgumentError  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")
LEFT_OUT = ("vit", "qwen2", "qwen2_window")  # no text; a tokenizer of its own kind, to which made-up words are nothing
EXPERTS = ("mixtral", "qwen3_moe", "qwen3_moe_normalised")  # which are not compressed
EXPERTS += ("deepseek_v2_experts", "deepseek_v2_groups", "deepseek_v3_experts")
DECODERS = ("t5", "t5_untied")  # behind an encoder: models of two texts


def check(model: Any, folder: Path, text: Path, out: Path, **budget: float) -> None:
    """Compress all of a model; reloaded, saved again and multiplied out it computes the same."""
    report = tnlib_adapters.compress(folder, out / "small", **by_options(what="all", calibrate=text, **budget))
    if "keep" in budget:
        assert 0.59 <= report.kept <= 0.6
    else:
        n_bits = 8 * (report.bytes_after["attention"] + report.bytes_after["matrices"])
        assert 0.85 * budget["bits"] * report.n_before <= n_bits <= budget["bits"] * report.n_before
    x, wanted = assert_reloads(model, out / "small")
    tnlib_adapters.compress(
        folder, out / "multiplied", **by_options(what="all", calibrate=text, layout="dense", **budget)
    )
    np.testing.assert_allclose(
        outputs(loaded_like(model, out / "multiplied"), x), wanted, atol=1e-4 * np.abs(wanted).max()
    )


WHOLE = [name for name in MODELS if name not in (*LEFT_OUT, *EXPERTS, *DECODERS)]


@pytest.mark.parametrize("name", mostly_slow(WHOLE, ["deepseek_v3"]))
def test_all_of_a_model(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    check(random_model(name), folders[name], text, tmp_path, keep=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_all_of_a_model_in_bits(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    check(random_model(name), folders[name], text, tmp_path, bits=4)


def assert_reloads(model: Any, out: Path, again: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and outputs of the compressed model: not the original's, but those of copies saved and multiplied out."""
    x, small = inputs(model), loaded_like(model, out)
    wanted = outputs(small, x)
    size = np.abs(wanted).max()
    assert np.abs(wanted - outputs(model, x)).max() > 1e-4 * size
    copies = out.parent / "copies" / out.name
    small.save_pretrained(copies / "again")
    small.dequantize().save_pretrained(copies / "dense")
    for name, tolerance in (("again", again), ("dense", 1e-4)):
        found = outputs(loaded_like(model, copies / name), x)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * size)
    return x, wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_stay(name: str, text: Path, tmp_path: Path) -> None:
    """The attention is compressed on a text; experts are refused by name, and written as they are."""
    model = random_model(name)
    folder = save_with_tokenizer(model, tmp_path / "model")
    for what in ("mlp", "all"):
        with refused(ArgumentError, "compress: what must be 'attention'", "experts a layer", ".experts.0."):
            tnlib_adapters.compress(folder, tmp_path / "none", Budget(keep=0.6), what=what, method="matrix")
    report = tnlib_adapters.compress(folder, tmp_path / "small", Budget(keep=0.6), calibration=text, what="attention")
    assert 0.59 <= report.kept <= 0.6
    tnlib_adapters.compress(folder, tmp_path / "rounded", Budget(bits=4), calibration=text, what="attention")
    for out in ("small", "rounded"):
        assert_reloads(model, tmp_path / out)
        before, after = (open_checkpoint(path).folder.tensors for path in (folder, tmp_path / out))
        for tensor in (name for name in before if "experts." in name or ".gate." in name):
            np.testing.assert_array_equal(after[tensor].read(), before[tensor].read())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2_direct", "deepseek_v3"])
def test_attention_on_latent_vectors(name: str, text: Path, tmp_path: Path) -> None:
    """Methods of single matrices factorise it, with and without a text; those of whole layers are refused by name."""
    model = random_model(name)
    folder = save_with_tokenizer(model, tmp_path / "model")
    for what in ("attention", "all"):
        for method in (None, "heads", "tucker", "cp"):
            known = "'calibrated' or 'quantized' or 'matrix' or 'ttm'"
            with refused(ArgumentError, f"compress: method must be {known}", "latent vectors"):
                tnlib_adapters.compress(folder, tmp_path / "none", Budget(keep=0.6), what=what, method=method)
    checkpoint = open_checkpoint(folder)
    matrices = [own.module for own in compressed_weights(checkpoint, "attention")]
    assert len(matrices) == 2 * (4 if checkpoint.config["q_lora_rank"] is None else 5)
    assert {*matrices} < {own.module for own in compressed_weights(checkpoint, "all")}
    before = sum(checkpoint.read(f"{matrix}.weight").size for matrix in matrices)
    for k, (what, options) in enumerate(
        (
            ("mlp", {"method": "matrix"}),
            ("attention", {"method": "matrix", "store": "int8"}),
            ("attention", {"method": "ttm"}),
            ("attention", {"calibrate": text, "store": "int8"}),
            ("attention", {"calibrate": text, "bits": 4}),
        )
    ):
        out = tmp_path / str(k)
        in_bits = "bits" in options
        report = tnlib_adapters.compress(folder, out, **by_options(keep=None if in_bits else 0.6, what=what, **options))
        assert in_bits or 0.59 <= report.kept <= 0.6
        layers = [(layer.n_before, layer.n_after) for layer in report.layers]
        if what == "attention":
            assert report.n_before == before
            assert np.sum(layers, axis=0).tolist() == [report.n_before, report.n_after]
            assert report.bytes_before["matrices"] == 4 * report.n_before
            assert all(layer.worst > 1e-3 for layer in report.layers)
        else:
            assert all(n_before == n_after for n_before, n_after in layers)
            assert all(layer.worst < 1e-6 for layer in report.layers)
        assert_reloads(model, out)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_encoders_and_decoders_are_compressed_without_a_text(name: str, text: Path, tmp_path: Path) -> None:
    model = random_model(name)
    folder = save_with_tokenizer(model, tmp_path / "model")
    for function, call in (
        (
            "compress",
            lambda: tnlib_adapters.compress(folder, tmp_path / "none", **by_options(keep=0.6, calibrate=text)),
        ),
        ("evaluate", lambda: tnlib_adapters.evaluate(folder, folder, text)),
    ):
        with refused(ArgumentError, f"{function}: IN must be a model of one stack to read a text, got a t5"):
            call()
    for k, (what, method, store) in enumerate((("attention", "heads", "int8"), ("all", "matrix", "float"))):
        out = tmp_path / str(k)
        report = tnlib_adapters.compress(folder, out, Budget(keep=0.6, store=store), what=what, method=method)
        assert 0.59 <= report.kept <= 0.6
        assert len(report.layers) == open_checkpoint(folder).n_layers
        assert report.measured == pytest.approx(report.predicted, rel=0.02)
        assert_reloads(model, out, again=0)


@pytest.mark.slow
def test_without_a_head_predictions_do_not_count(folders: Any, text: Path, tmp_path: Path) -> None:
    """A head that is not in the folder would be made at random, another one every time."""
    reports = [
        tnlib_adapters.compress(folders["llama_base"], tmp_path / f"{k}", **by_options(keep=0.5, calibrate=text))
        for k in range(2)
    ]
    assert [report.measure for report in reports] == ["1 - cosine"] * 2
    assert reports[0].measured == reports[1].measured


@pytest.mark.slow
def test_nearly_nothing_is_kept(folders: Any, text: Path, tmp_path: Path) -> None:
    """Values that are truncated to nothing leave nothing to fit the output weights to."""
    for name in ("gpt_neox", "llama"):
        for keep in (0.05, 0.08, 0.11):
            out = tmp_path / f"{name}-{keep}"
            report = tnlib_adapters.compress(folders[name], out, Budget(keep=keep), calibration=text, what="all")
            assert report.kept <= keep
            assert np.isfinite(list(report.quality.values())).all()
