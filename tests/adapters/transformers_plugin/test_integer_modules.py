"""Integers in transformers: packed codes in memory, dequantized in every call, saved as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import few_steps
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from compressed_folders import by_options, read_config  # noqa: E402
from tnlib_adapters import Budget, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.compress import factorise  # noqa: E402
from tnlib_adapters.compression.methods.method_table import METHODS  # noqa: E402
from tnlib_adapters.compression.methods.out_of_core import StoredMatrices  # noqa: E402
from tnlib_adapters.compression.write import write_checkpoint  # noqa: E402
from tnlib_adapters.factors.factored_matrix import FactoredMatrix  # noqa: E402
from tnlib_adapters.factors.integers import BITS, IntegerFormat  # noqa: E402
from tnlib_adapters.factors.rounding import round_to_nearest  # noqa: E402
from tnlib_adapters.reference.model import run  # noqa: E402
from tnlib_adapters.transformers_plugin import keep_dequantized  # noqa: E402
from tnlib_adapters.transformers_plugin.factored_linear import dequantized  # noqa: E402
from transformers import AutoModel  # noqa: E402
from transformers_models import inputs, loaded_like, outputs  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")
LAYOUTS = ("factored", "dense")


def codes_of(model: Any) -> dict[str, np.ndarray]:
    return {n: p.numpy().copy() for n, p in model.named_parameters() if p.dtype in (torch.uint8, torch.int8)}


def close(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max())


MODELS_AND_STORES = [("bert", "int8"), ("bert", "int2"), ("gpt2_lm", "int4"), ("llama", "int8"), ("llama", "int3")]


@pytest.mark.parametrize(
    ("method", "name", "store"),
    mostly_slow(
        [(method, *case) for method in METHODS for case in MODELS_AND_STORES],
        [("ttm", "llama", "int3"), ("tucker", "bert", "int2")],
    ),
)
def test_transformers_computes_the_same_as_numpy(
    method: str, name: str, store: str, saved: Any, tmp_path: Path
) -> None:
    def hidden(model: Any) -> np.ndarray:
        with torch.no_grad():
            values: np.ndarray = model.eval()(input_ids=torch.from_numpy(tokens)).last_hidden_state.numpy()
        return values

    for layout in LAYOUTS:
        compress(saved(name)[1], tmp_path / layout, **by_options(keep=0.5, store=store, method=method, layout=layout))
    tokens = np.random.default_rng(0).integers(1, 40, size=(2, 9))
    wanted = run(open_checkpoint(tmp_path / "factored"), tokens).hidden
    limit = {"atol": 1e-4 * np.abs(wanted).max()}
    dtype = torch.int8 if store == "int8" else torch.uint8
    model = AutoModel.from_pretrained(tmp_path / "factored")
    assert any(p.dtype == dtype and not p.requires_grad for p in model.parameters())
    found = hidden(model)
    np.testing.assert_allclose(found, wanted, **limit)
    np.testing.assert_allclose(hidden(AutoModel.from_pretrained(tmp_path / "dense")), wanted, **limit)

    model.save_pretrained(tmp_path / "again")
    sections = [read_config(tmp_path / folder)["quantization_config"]["layers"] for folder in ("again", "factored")]
    assert sections[0] == sections[1]
    again, written = (open_checkpoint(tmp_path / folder).folder.tensors for folder in ("again", "factored"))
    for tensor in written:
        if ".tnlib." in tensor:
            same = again[tensor.removeprefix(open_checkpoint(tmp_path / "factored").prefix)]
            assert same.dtype == written[tensor].dtype
            np.testing.assert_array_equal(same.read(), written[tensor].read())
    np.testing.assert_array_equal(hidden(AutoModel.from_pretrained(tmp_path / "again")), found)

    keep_dequantized(model)
    np.testing.assert_allclose(hidden(model), found, rtol=1e-5, atol=1e-5 * np.abs(found).max())
    assert model.state_dict().keys() == AutoModel.from_pretrained(tmp_path / "factored").state_dict().keys()
    keep_dequantized(model, keep=False)
    np.testing.assert_array_equal(hidden(model), found)

    dense = model.dequantize()
    np.testing.assert_allclose(hidden(dense), wanted, **limit)
    assert not any(p.dtype == dtype for p in dense.parameters())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("axis", "group"), [(0, 0), (0, 4), (1, 3), (2, 5), (2, 7)])
def test_torch_dequantizes_as_numpy_does(bits: int, axis: int, group: int) -> None:
    a = np.random.default_rng(1).standard_normal((9, 7, 10))
    form = IntegerFormat(bits, axis, group)
    integers = round_to_nearest(a, form)
    codes, scales = (torch.from_numpy(np.ascontiguousarray(x)) for x in (integers.stored(), integers.scales))
    for dtype, wanted in ((torch.float32, integers.values()), (torch.float64, integers.values(np.float64))):
        found = dequantized(codes, scales, form, axis, a.shape[axis], dtype)
        np.testing.assert_array_equal(found.numpy(), wanted)


MIXED = {  # formats that `compress` does not choose: of other axes and groups, and different for every part
    "axes": {"left": IntegerFormat(3, 1, 5), "right": IntegerFormat(8, 0, 4)},
    "int8 beside floats": {"left": IntegerFormat(8, 0)},
    "int8 beside fewer bits": {"left": IntegerFormat(8, 0), "right": IntegerFormat(6, 1, 16)},
    "a table by columns": {"left": IntegerFormat(5, 0, 8), "right": IntegerFormat(2, 0)},
    "int8 by columns in groups": {"left": IntegerFormat(8, 0, 6), "right": IntegerFormat(8, 1, 6)},
    "int8 by rows": {"left": IntegerFormat(8, 1), "right": IntegerFormat(8, 0)},
}


@pytest.mark.parametrize("case", mostly_slow(MIXED, [*MIXED][::3]))
def test_parts_in_formats_of_their_own(case: str, saved: Any, tmp_path: Path) -> None:
    model, source = saved("gpt2_lm")
    checkpoint, formats = open_checkpoint(source), MIXED[case]
    plan = factorise(checkpoint, "matrix", what="all").plan(0.2)

    def rounded(matrix: FactoredMatrix) -> FactoredMatrix:
        own = {part: form for part, form in formats.items() if part in matrix.arrays}
        return matrix.with_integers({part: round_to_nearest(matrix.arrays[part], form) for part, form in own.items()})

    matrices = StoredMatrices(plan.matrices.workspace)
    for module, own in plan.matrices.items():
        matrices.add(module, [*map(rounded, own)])
    plan = replace(plan, matrices=matrices)
    for layout in LAYOUTS:
        (tmp_path / layout).mkdir()
        for _ in write_checkpoint(checkpoint, plan, layout, tmp_path / layout):
            pass
    x, small = inputs(model), loaded_like(model, tmp_path / "factored")
    wanted = outputs(loaded_like(model, tmp_path / "dense"), x)
    close(outputs(small, x), wanted, 1e-4)
    close(run(open_checkpoint(tmp_path / "factored"), x).logits, wanted, 1e-4)
    small.save_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(outputs(loaded_like(model, tmp_path / "again"), x), outputs(small, x))
    close(outputs(small.dequantize(), x), wanted, 1e-4)


@pytest.mark.parametrize("keep", mostly_slow([0.5, 1], [0.5]))
@pytest.mark.parametrize(
    ("name", "store"),
    mostly_slow(
        [("gpt2_lm", "int4"), ("gemma", "int3"), ("gptj", "int4"), ("t5_encoder", "int2")], [("gemma", "int3")]
    ),
)
def test_tables_and_all_other_matrices(name: str, store: str, keep: float, saved: Any, tmp_path: Path) -> None:
    """Tied, scaled and untied tables; at 1 all matrices are dense, and only rounded."""
    model, source = saved(name)
    for layout in LAYOUTS:
        options = {"keep": keep, "method": "matrix", "what": "all", "store": store, "layout": layout}
        compress(source, tmp_path / layout, **by_options(**options))
    x = inputs(model)
    small = loaded_like(model, tmp_path / "factored")
    wanted = outputs(loaded_like(model, tmp_path / "dense"), x)
    close(outputs(small, x), wanted, 1e-4)
    forward = run(open_checkpoint(tmp_path / "factored"), x)
    close(forward.hidden if forward.logits is None else forward.logits, wanted, 1e-4)

    table = small.get_input_embeddings()
    assert codes_of(table)
    ids = torch.tensor([[3, 1], [0, 3]])
    with torch.no_grad():
        np.testing.assert_allclose(table(ids), table.to_dense()(ids), rtol=1e-5, atol=1e-6)
    before = outputs(small, x)
    keep_dequantized(small)
    close(outputs(small, x), before)
    small.save_pretrained(tmp_path / "again")
    sections = [read_config(tmp_path / folder)["quantization_config"] for folder in ("again", "factored")]
    assert sections[0]["modules"] == sections[1]["modules"]
    np.testing.assert_array_equal(outputs(loaded_like(model, tmp_path / "again"), x), before)
    close(outputs(small.dequantize(), x), wanted, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["int8", "int3"])
def test_fitted_factors_in_integers(store: str, folders: Any, text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    few_steps(monkeypatch, 2)
    options = {"keep": 0.3, "what": "all", "calibrate": text, "store": store}
    for layout in LAYOUTS:
        compress(folders["bert"], tmp_path / layout, **by_options(layout=layout, **options))
    small, dense = (AutoModel.from_pretrained(tmp_path / layout).eval() for layout in LAYOUTS)
    section = read_config(tmp_path / "factored")["quantization_config"]
    assert "interpolative" in {entry["kind"] for entry in section["modules"].values()}
    x = inputs(small)
    close(outputs(small, x), outputs(dense, x), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_leave_the_codes_alone(dtype: Any, saved: Any, tmp_path: Path) -> None:
    model, source = saved("llama")
    compress(source, tmp_path / "out", Budget(keep=0.5, store="int4"), what="all", method="matrix")
    small = loaded_like(model, tmp_path / "out")
    x, codes, wanted = inputs(model), codes_of(small), outputs(small, x=inputs(model))
    small.to(dtype)
    assert small.dtype == dtype
    assert codes_of(small).keys() == codes.keys()
    for name, values in codes_of(small).items():
        np.testing.assert_array_equal(values, codes[name])
    with torch.no_grad():
        found = small(input_ids=torch.from_numpy(x)).logits
    assert found.dtype == dtype
    close(found.double().numpy(), wanted, 1e-5 if dtype == torch.float64 else 0.15)

    small.save_pretrained(tmp_path / "again")  # scales are written in bfloat16 from every dtype
    stored, again = (open_checkpoint(tmp_path / folder).folder.tensors for folder in ("out", "again"))
    for name, info in stored.items():
        if info.dtype in ("U8", "BF16"):
            assert again[name].dtype == info.dtype
            np.testing.assert_array_equal(again[name].read_stored(), info.read_stored())


def test_scales_have_gradients_and_codes_have_none(saved: Any, tmp_path: Path) -> None:
    compress(saved("bert")[1], tmp_path / "out", Budget(keep=0.5, store="int4"), method="matrix", what="attention")
    model = AutoModel.from_pretrained(tmp_path / "out").train()
    model(input_ids=torch.tensor([[3, 5, 7]])).last_hidden_state.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if ".tnlib." in name}
    assert {name.endswith("_scale") or name.endswith("_bias") for name, g in gradients.items() if g is not None} == {
        True
    }
    assert any(name.endswith("_scale") and g.abs().max() > 0 for name, g in gradients.items() if g is not None)


def test_scales_do_not_set_the_dtype_of_the_model(saved: Any, tmp_path: Path) -> None:
    """Without a dtype in config.json transformers takes that of the first floats, which may be scales in bfloat16."""
    model = saved("gemma")[0]
    folder = tmp_path / "source"
    model.save_pretrained(folder)
    config = read_config(folder)
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    compress(folder, tmp_path / "out", Budget(keep=0.12, store="int4"), what="all", method="matrix")
    tensors = open_checkpoint(tmp_path / "out").folder.tensors
    assert next(tensors[name].dtype for name in sorted(tensors) if tensors[name].dtype != "U8") == "BF16"
    assert type(model).from_pretrained(tmp_path / "out").dtype == torch.float32


@pytest.mark.slow
def test_a_compiled_model_unpacks_without_a_break(saved: Any, tmp_path: Path) -> None:
    compress(saved("bert")[1], tmp_path / "out", Budget(keep=0.5, store="int3"), method="matrix", what="attention")
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    layer = model.encoder.layer[0].attention.self.query
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x))
