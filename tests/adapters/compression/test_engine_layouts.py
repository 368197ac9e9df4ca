"""Layouts of inference engines: what is written, who reads it without tnlib, and what is refused beforehand."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import refused

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from compressed_folders import few_steps, leave_out_pictures, scheme_of  # noqa: E402
from slow_cases import mostly_slow  # noqa: E402
from tnlib_adapters import Budget, Run, builtin_path, compress, evaluate, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.calibration.quantize import forms_of  # noqa: E402
from tnlib_adapters.compression.compressed_part import compressed_weights  # noqa: E402
from tnlib_adapters.compression.engine_layouts import ENGINES, GGUF  # noqa: E402
from tnlib_adapters.compression.request import Request  # noqa: E402
from tnlib_adapters.factors.model_weights import count_parameters  # noqa: E402
from transformers_models import made_up_text  # noqa: E402

from tnlib import ArgumentError  # noqa: E402

Written = Callable[..., Path]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(made_up_text(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def written(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """Layout and budget -> folder of the built-in Llama; made once, from statistics that are collected once."""
    place = tmp_path_factory.mktemp("layouts")

    @functools.cache
    def get(layout: str, budget: Budget, source: Path | None = None, effort: str = "low", **options: Any) -> Path:
        source = source or builtin_path("llama")
        out, run = place / f"{len([*place.iterdir()])}", Run(folder=place / f"{source.name}-statistics")
        compress(source, out, budget, calibration=text, layout=layout, effort=effort, run=run, **options)
        return out

    with pytest.MonkeyPatch.context() as patch:
        few_steps(patch, 2)
        leave_out_pictures(patch)
        yield get


def logits_of(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(5, 45)[None]).logits


def dense(folder: Path) -> Any:
    """The model that the integers of a folder stand for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(builtin_path("llama"), dtype=torch.float32)
    checkpoint = open_checkpoint(folder)
    read = {name: torch.from_numpy(np.array(info.read())) for name, info in checkpoint.folder.tensors.items()}
    left = model.load_state_dict(read, strict=False)
    assert left.missing_keys == ["lm_head.weight"]  # tied
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["low", "default"])
def test_transformers_reads_compressed_tensors_without_tnlib(written: Written, effort: str) -> None:
    pytest.importorskip("compressed_tensors")
    out = written("compressed-tensors", Budget(bits=3.5), effort=effort)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert torch.equal(logits_of(model), logits_of(dense(out)))


@pytest.mark.parametrize("layout", mostly_slow(sorted(ENGINES.keys() - {GGUF}), ["gptq"]))
def test_every_weight_has_a_width_and_a_group_of_the_engine(layout: str, written: Written) -> None:
    out, engine = written(layout, Budget(bits=4.0)), ENGINES[layout]
    tensors = open_checkpoint(out).folder.tensors
    integers = {name: info for name, info in tensors.items() if hasattr(info, "n_bits")}
    assert len(integers) == 28  # q, k, v, o, gate, up, down in 4 layers
    assert {info.n_bits for info in integers.values()} <= {*engine.bits}
    for info in integers.values():
        group = info.shape[1] // info.n_groups
        assert group in engine.groups or (group == info.shape[1] and 0 in engine.groups)
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == engine.of_causal
    for name, info in integers.items():
        bits, group = scheme_of(section, name.removesuffix(".weight"))
        assert (bits, group or info.shape[1]) == (info.n_bits, info.shape[1] // info.n_groups)


@pytest.mark.parametrize("layout", mostly_slow(["compressed-tensors", "gptq"], ["gptq"]))
@pytest.mark.parametrize("bits", mostly_slow([3.0, 4.0], [4.0]))
def test_fused_layers_have_one_scheme_in_mixed_widths(layout: str, bits: float, written: Written) -> None:
    """Queries, keys and values, and gate and up, which engines join under names that are not in the file."""
    out = written(layout, Budget(bits=bits))
    checkpoint = open_checkpoint(out)
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    kinds = set()
    for layer in checkpoint.wiring.layers:
        for inputs in (layer.attention.inputs, *(part.inputs for part in layer.feed_forward_layers)):
            members = [linear.module for linear in inputs]
            (scheme,) = {scheme_of(section, module) for module in members}
            if section["quant_method"] == "gptq":
                fused = f"{members[0].rpartition('.')[0]}.fused_proj"
                assert scheme_of(section, fused) == scheme
            kinds.add(scheme)
    assert len({width for width, _ in kinds}) > 1
    average = json.loads((out / "tnlib_report.json").read_text())["average_bits"]
    assert 0.9 * bits < average <= bits


def test_bits_of_the_budget_are_those_of_the_file(written: Written) -> None:
    out = written("compressed-tensors", Budget(bits=4.0))
    report = json.loads((out / "tnlib_report.json").read_text())
    assert report["what"] == "linear"
    assert report["average_bits"] <= 4.0
    stored = sum(report["bytes_after"].values()) - report["bytes_after"]["other"]
    assert 8 * stored <= 4.0 * report["n_before"] + 28 * 8 * 16  # shapes of the weights


@pytest.mark.slow
def test_one_width_for_all_in_groups(written: Written) -> None:
    out = written("onnxruntime", Budget(store="int4"))
    tensors = open_checkpoint(out).folder.tensors
    kinds = {(info.n_bits, info.shape[1] // info.n_groups) for info in tensors.values() if hasattr(info, "n_bits")}
    assert kinds == {(4, 128), (4, 64)}


@pytest.mark.slow
def test_evaluate_and_compress_read_a_written_folder(written: Written, text: Path, tmp_path: Path) -> None:
    out = written("gptq", Budget(bits=8.0))
    measured = evaluate(builtin_path("llama"), out, text)
    assert measured.divergence < 1e-3
    assert compress(out, tmp_path / "again", Budget(keep=0.5)).n_after > 0


def test_what_an_engine_cannot_hold_is_refused_before_any_work(saved: Any, text: Path, tmp_path: Path) -> None:
    four = Budget(bits=4.0)
    cases: list[tuple[str, Budget, dict[str, Any], str]] = [
        ("gptq", Budget(keep=0.5), {}, "keep"),
        ("gptq", four, {"what": "all", "method": "calibrated"}, "method"),
        ("gptq", Budget(store="int8"), {"method": "matrix"}, "method"),
        ("gptq", four, {"source": saved("bert")[1]}, "predicts"),
        ("compressed-tensors", four, {"source": saved("gpt2")[1]}, "linear layers of their own"),
        ("compressed-tensors", four, {"source": saved("bert")[1]}, "multiples of 32"),
        ("onnxruntime", Budget(store="int3"), {}, "bits"),
    ]
    for layout, budget, options, word in cases:
        options = {"source": builtin_path("llama"), "calibration": text, "layout": layout} | options
        with refused(ArgumentError, word):
            compress(out=tmp_path / "out", budget=budget, **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_onnxruntime_computes_with_the_integers_of_an_encoder(written: Written, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    from tnlib_adapters.transformers_plugin.onnx_export import export_onnx
    from transformers_models import save_with_tokenizer

    config = transformers.BertConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    source = save_with_tokenizer(transformers.BertModel(config).eval(), tmp_path / "in")
    out = written("onnxruntime", Budget(bits=6.0), source=source)
    graph = export_onnx(out, tmp_path / "graph")
    whole = export_onnx(source, tmp_path / "whole")
    x = {"input_ids": np.arange(6, 30)[None], "attention_mask": np.ones((1, 24), np.int64)}
    x["token_type_ids"] = np.zeros_like(x["input_ids"])
    found, before = (onnxruntime.InferenceSession(str(g)).run(None, x)[0] for g in (graph, whole))
    assert np.linalg.norm(found - before) < 0.1 * np.linalg.norm(before)
    assert graph.stat().st_size < 0.4 * whole.stat().st_size
    other = written("compressed-tensors", Budget(bits=3.0), source=source)
    with refused(ArgumentError, "--layout onnxruntime"):
        export_onnx(other, tmp_path / "graph2")


@pytest.mark.parametrize("layout", sorted(ENGINES))
def test_fewer_bits_than_the_smallest_forms_take_are_refused_before_any_work(
    layout: str, text: Path, tmp_path: Path
) -> None:
    if layout == GGUF:
        pytest.importorskip("gguf")
    model = open_checkpoint(builtin_path("llama"))
    what = Request.of(Budget(bits=8), calibration=text, layout=layout).what
    weights, smallest = compressed_weights(model, what, with_text=True), 0
    n_parameters = count_parameters(weights)
    for n_out, n_in in (own.weight.shape for own in weights):
        forms = forms_of(Request.of(Budget(bits=8), calibration=text, layout=layout)).whole(n_in, 0)
        smallest += min(form.n_bits((n_in, n_out)) for _, of_group in forms for form in of_group)
    fewest = math.ceil(100 * smallest / n_parameters) / 100
    for bits in (fewest - 0.01, ENGINES[layout].fewest_bits):
        if bits < smallest / n_parameters:
            with refused(ArgumentError, f"compress: bits must be at least {fewest:g} for layout {layout!r}"):
                compress(builtin_path("llama"), tmp_path / "out", Budget(bits=bits), calibration=text, layout=layout)
    Request.of(Budget(bits=fewest), calibration=text, layout=layout).check(model)
    assert not any(tmp_path.iterdir())
