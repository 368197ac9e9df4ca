"""Methods on a text on every kind of architecture: what transformers loads computes what numpy reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import few_steps, read_config, read_tensors
from oracles import assert_close, normal, refused
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tnlib_adapters.transformers_plugin")

from compressed_folders import by_options  # noqa: E402
from tnlib_adapters import Budget, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.evaluation.evaluate import evaluate  # noqa: E402
from tnlib_adapters.compression.planner import factorise, round_plan  # noqa: E402
from tnlib_adapters.compression.write import write_checkpoint  # noqa: E402
from tnlib_adapters.transformers_plugin import FactoredLinear  # noqa: E402
from transformers_models import inputs, loaded_like, made_up_text, outputs, save_with_tokenizer  # noqa: E402

from tnlib import ArgumentError  # noqa: E402

Saved = Callable[[str], tuple[Any, Path]]
# separate and fused by columns; grouped and separate, fused by blocks, fused by groups; rotary, slopes, norms of heads
NAMES = ["bert", "gpt2_lm", "llama_biases", "phi3", "falcon_new", "bloom", "qwen3_biases"]


def write(source: Path, out: Path, method: str, *, layout: str = "factored", bits: int | None = None) -> Any:
    """Write the folder of a model compressed by made-up inputs; return its plan."""
    checkpoint = open_checkpoint(source)
    widths = (checkpoint.sizes.d_model + 1, checkpoint.sizes.widths["o"])
    x, y = (normal((200, n), seed=n) @ np.diag(0.9 ** np.arange(n)) for n in widths)
    seen = {f"{k}.{part}": a.T @ a for k in range(checkpoint.n_layers) for part, a in (("x", x), ("y", y))}
    plan = factorise(checkpoint, method, inputs=seen).plan(0.5)
    stored = plan if bits is None else round_plan(plan, checkpoint.wiring, bits)
    out.mkdir()
    for _ in write_checkpoint(checkpoint, stored, layout, out):
        pass
    return plan


@pytest.mark.parametrize(
    ("name", "method"),
    mostly_slow(
        [(name, method) for name in NAMES for method in ("ttm", "tucker")],
        [("bert", "ttm"), ("llama_biases", "tucker"), ("phi3", "ttm"), ("falcon_new", "tucker"), ("bloom", "ttm")],
    ),
)
def test_factors_compute_what_their_product_does(name: str, method: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    plan = write(source, tmp_path / "factored", method)
    write(source, tmp_path / "dense", method, layout="dense")
    assert 0.49 <= plan.kept <= 0.5
    before, after = (sum(t.values.size for t in read_tensors(f).values()) for f in (source, tmp_path / "factored"))
    assert before - after == plan.n_before - plan.n_after

    factored, x = loaded_like(model, tmp_path / "factored"), inputs(model)
    got = outputs(factored, x)
    assert_close(got, outputs(loaded_like(model, tmp_path / "dense"), x), np.float32, factor=256)
    assert np.abs(got - outputs(model, x)).max() > 1e-3 * np.abs(got).max()  # half of the numbers are gone
    layers = sum(isinstance(module, FactoredLinear) for module in factored.modules())
    together = method == "tucker" and name == "gpt2_lm"  # one layer writes queries and keys side by side
    assert layers == (3 if together else 4) * model.config.num_hidden_layers
    factored.save_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(outputs(loaded_like(model, tmp_path / "again"), x), got)
    assert_close(outputs(factored.dequantize(), x), got, np.float32, factor=256)


@pytest.mark.parametrize("method", ["ttm", "tucker"])
@pytest.mark.parametrize("name", mostly_slow(["bert", "phi3", "falcon_new"], ["phi3"]))
def test_in_one_byte_a_number(name: str, method: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    write(source, tmp_path / "int8", method, bits=8)
    write(source, tmp_path / "wide", method)
    narrow, wide = (open_checkpoint(tmp_path / folder) for folder in ("int8", "wide"))
    for layer in range(narrow.n_layers):
        for projection, weight in wide.projections(layer).weights.items():
            off = np.linalg.norm(narrow.projections(layer).weights[projection] - weight)
            assert 0 < off < 0.05 * np.linalg.norm(weight)

    factored, x = loaded_like(model, tmp_path / "int8"), inputs(model)
    assert any(parameter.dtype == torch.int8 for parameter in factored.parameters())
    got = outputs(factored, x)
    assert_close(got, outputs(factored.dequantize(), x), np.float32, factor=1024)


def test_queries_and_keys_of_a_layer_share_their_basis(saved: Saved, tmp_path: Path) -> None:
    """One Tucker of both in the file, one parameter in memory, whatever else the module of the keys holds."""
    for name in ("bert", "gpt2_lm", "phi3"):
        model, source = saved(name)
        write(source, tmp_path / name, "tucker")
        for layer in read_config(tmp_path / name)["quantization_config"]["layers"]:
            assert [(piece["of"], piece["kind"]) for piece in layer[:1]] in ([("qk", "tucker")], [("qk", "stack")])
            assert [piece["of"] for piece in layer[1:]] == ["v", "o"]
        names = [part for part, _ in loaded_like(model, tmp_path / name).named_parameters() if "qk_factor2" in part]
        assert names
        assert len(names) <= model.config.num_hidden_layers


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    few_steps(monkeypatch, 8)
    file = tmp_path / "text.txt"
    file.write_text(made_up_text(40), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "name", mostly_slow(["gpt_neox", "falcon_new", "falcon_alibi", "bloom", "qwen3_biases"], ["falcon_new", "bloom"])
)
def test_a_text_helps_and_factors_compute_what_their_product_does(
    name: str, saved: Callable[[str], tuple[Any, Path]], text: Path, tmp_path: Path, without_pictures: None
) -> None:
    model, _ = saved(name)
    source = save_with_tokenizer(model, tmp_path / "in")
    for out, options in (("plain", {}), ("calibrated", {"calibrate": text})):
        report = compress(source, tmp_path / out, **by_options(keep=0.6, **options))
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
        compress(saved("vit")[1], tmp_path / "out", Budget(keep=0.5), calibration=text, what="attention")
    assert not (tmp_path / "out").exists()
