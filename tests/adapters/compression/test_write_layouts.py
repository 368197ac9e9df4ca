"""Names, shapes, dtypes and order of the tensors in a written folder, for every way a source is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import WEIGHTS, random_folder, representable, safetensors_file
from compressed_folders import (
    attention_tensors,
    by_options,
    dense_layers,
    n_attention,
    read_config,
    read_file,
    read_index,
    read_tensors,
)
from oracles import refused
from slow_cases import mostly_slow
from tnlib_adapters import Budget, compress, open_checkpoint
from tnlib_adapters.compression.methods.method_table import METHODS

from tnlib import TnlibError

pytestmark = pytest.mark.usefixtures("without_pictures")
SOURCES: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "metadata": {"format": "pt", "note": "mine"}},
    "bert under a prefix": {"model_type": "bert", "prefix": "bert."},
    "gpt2": {"model_type": "gpt2", "metadata": {"format": "np"}},
    "gpt2, no prefix, F16": {"model_type": "gpt2", "prefix": "", "dtype": "F16"},
    "bert, BF16, 3 files": {"model_type": "bert", "dtype": "BF16", "n_files": 3},
    "gpt2, F16, 2 files": {"model_type": "gpt2", "dtype": "F16", "n_files": 2},
    "gpt2, F64": {"model_type": "gpt2", "dtype": "F64"},
}
CASES = [(name, method) for name in SOURCES for method in ("heads", "matrix", "tucker")]
each_case = pytest.mark.parametrize(("name", "method"), mostly_slow(CASES, CASES[::4]))


def make(name: str, tmp_path: Path) -> Path:
    return random_folder(tmp_path / "in", d=16, n_heads=4, **SOURCES[name])


def order(folder: Path) -> list[str]:
    """Names in the order of the bytes, file by file."""
    index = read_index(folder)
    files = sorted(set(index["weight_map"].values())) if index else [WEIGHTS]
    return [name for file in files for name in read_file(folder / file)]


def is_ours(name: str) -> bool:
    return ".tnlib." in name


@each_case
def test_factored(name: str, method: str, tmp_path: Path) -> None:
    source, out = make(name, tmp_path), tmp_path / "out"
    dtype = SOURCES[name].get("dtype", "F32")
    report = compress(
        source,
        out,
        **by_options(keep=0.6 if method == "heads" else 0.5885 if method == "matrix" else 1.0, method=method),
    )
    before, after = read_tensors(source), read_tensors(out)
    old = attention_tensors(source)
    section = read_config(out)["quantization_config"]
    assert (section["quant_method"], section["method"]) == ("tnlib", method)

    described = {}
    base = "h.{}.attn" if SOURCES[name]["model_type"] == "gpt2" else "encoder.layer.{}.attention"
    prefix = SOURCES[name].get("prefix", "transformer." if SOURCES[name]["model_type"] == "gpt2" else "")
    for layer, pieces in enumerate(section["layers"]):
        assert sorted("".join(piece["of"] for piece in pieces)) == sorted("qkvo")
        for piece in pieces:
            for part, shape in piece["shapes"].items():
                described[f"{prefix}{base.format(layer)}.tnlib.{piece['of']}_{part}"] = tuple(shape)
    assert described == {key: tensor.values.shape for key, tensor in after.items() if is_ours(key)}
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    assert {after[key].values.size for key in old if key.endswith("weight")} == {0}, "a place, and no weight"
    for key in before.keys() - old.keys():
        np.testing.assert_array_equal(after[key].values, before[key].values)
        assert after[key].file == before[key].file
    held = sum(tensor.values.size for key, tensor in after.items() if is_ours(key) or key in old)
    assert held == report.n_after == n_attention(out)


@each_case
def test_dense(name: str, method: str, tmp_path: Path) -> None:
    source, out = make(name, tmp_path), tmp_path / "out"
    keep = 0.6 if method == "heads" else 0.5885 if method == "matrix" else 1.0
    compress(source, out, Budget(keep=keep), method=method, layout="dense", what="attention")
    before, after = read_tensors(source), read_tensors(out)
    assert before.keys() == after.keys()
    inside = attention_tensors(source).keys()
    for key, tensor in before.items():
        assert (after[key].dtype, after[key].values.shape) == (tensor.dtype, tensor.values.shape)
        assert after[key].file == tensor.file or key in inside  # the index says where a layer's tensors are
    assert read_config(out) == read_config(source)
    changed = {key for key in before if not np.array_equal(before[key].values, after[key].values)}
    assert changed <= inside
    if keep < 1:
        assert {key for key in inside if key.endswith("weight")} & changed
    unchanged = [key for key in order(source) if key not in inside]
    assert [key for key in order(out) if key not in inside] == unchanged


@each_case
def test_both_layouts_open_as_the_same_attention(name: str, method: str, tmp_path: Path) -> None:
    source = make(name, tmp_path)
    keep = 0.6 if method == "heads" else 0.5885 if method == "matrix" else 1.0
    for layout in ("factored", "dense"):
        compress(source, tmp_path / layout, Budget(keep=keep), method=method, layout=layout, what="attention")
    one, other = (open_checkpoint(tmp_path / layout) for layout in ("factored", "dense"))
    roundoff = {"F64": 1e-12, "F32": 1e-6, "F16": 4e-3, "BF16": 3e-2}[SOURCES[name].get("dtype", "F32")]
    wanted = dense_layers(tmp_path / "dense")
    for layer in range(one.n_layers):
        a, b = one.attention(layer), other.attention(layer)
        assert a.scale == b.scale
        for head in range(4):
            dense_qk, dense_ov = (kind[head] for kind in wanted[layer].operators())
            for mine, theirs, reference in ((a.qk, b.qk, dense_qk), (a.ov, b.ov, dense_ov)):
                x, y = mine(head).full().astype(float), theirs(head).full().astype(float)
                assert np.linalg.norm(x - y) <= roundoff * np.linalg.norm(y)
                width = reference.shape[1]
                assert np.linalg.norm(y[:, :width] - reference) <= 1e-5 * np.linalg.norm(reference)
        np.testing.assert_allclose(a.b_O, b.b_O, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_integer_weights_are_refused(method: str, tmp_path: Path) -> None:
    source = random_folder(tmp_path / "in", d=16, n_heads=4)
    tensors = {k: (t.dtype, t.values) for k, t in read_tensors(source).items()}
    guilty = "encoder.layer.1.attention.self.key.weight"
    tensors[guilty] = ("I64", np.ones((16, 16), np.int64))
    safetensors_file(source / WEIGHTS, tensors)
    with refused(TnlibError, guilty, "I64"):
        compress(source, tmp_path / "out", Budget(keep=0.6), method=method, what="attention")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(("method", "layout"), [("tucker", "factored"), ("cp", "factored"), ("ttm", "factored")])
def test_factors_beyond_half_precision_are_refused_quietly(method: str, layout: str, tmp_path: Path) -> None:
    """Weights fit; the norm of all of them, which one factor holds, does not. Warnings are errors here."""
    source = random_folder(tmp_path / "in", d=36, n_heads=4, dtype="F16", scale=1.2e4)
    assert all(np.isfinite(t.values).all() for t in read_tensors(source).values())
    with refused(TnlibError, "tensor 'encoder.layer.", "F16"):
        compress(source, tmp_path / "out", Budget(keep=0.589), method=method, layout=layout, what="attention")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
def test_factors_are_rounded_once_to_the_dtype(dtype: str, tmp_path: Path) -> None:
    source = random_folder(tmp_path / "in", d=16, n_heads=4, dtype=dtype)
    compress(source, tmp_path / "out", Budget(keep=0.5885), method="matrix", what="attention")
    for key, tensor in read_tensors(tmp_path / "out").items():
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor.values, representable(tensor.values, dtype).astype(float))
        assert key.startswith("embeddings") or is_ours(key) or key in read_tensors(source)
