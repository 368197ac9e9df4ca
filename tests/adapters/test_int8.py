"""Factors in one byte a number: how far off they are, on disk, in numpy and in a running model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import change_tensors
from compressed_folders import read_config
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from oracles import refused
from tnlib_adapters import builtin_path, compress, open_checkpoint
from tnlib_adapters.compression.methods.table import METHODS
from tnlib_adapters.factors.int8 import narrow, round_slices, scale_shapes, widen
from tnlib_adapters.reference.model import run

from tnlib import ArgumentError, FileFormatError

pytestmark = pytest.mark.usefixtures("without_pictures")


def weights(folder: Path) -> list[Any]:
    checkpoint = open_checkpoint(folder)
    return [checkpoint.projections(layer).weights for layer in range(checkpoint.n_layers)]


@given(
    st.data(),
    array_shapes(min_dims=1, max_dims=4, max_side=5),
)
def test_no_entry_is_off_by_more_than_half_a_step(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a = data.draw(arrays(np.float64, shape, elements=st.floats(-1e30, 1e30, allow_subnormal=False)))
    leg = data.draw(st.integers(0, a.ndim - 1))
    q, scale = round_slices(a, leg)
    assert q.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.size == shape[leg]
    largest = np.abs(np.moveaxis(a, leg, 0).reshape(shape[leg], -1)).max(axis=1)
    step = largest.reshape(scale.shape) / 127
    assert np.all(np.abs(q * scale.astype(np.float64) - a) <= 0.5001 * step + 1e-37)


def test_slices_do_not_see_each_other() -> None:
    """A column a million times larger than the next costs the next nothing."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((50, 3))
    q, _ = round_slices(a * [1, 1e6, 1e-6], 1)
    plain, _ = round_slices(a, 1)
    assert np.array_equal(q, plain)


def test_every_component_of_two_factors_has_a_scale() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.standard_normal((6, 3)) * [1, 1e3, 1e-3], rng.standard_normal((3, 5)) * [[1e-2], [1], [1e2]]
    arrays = {"left": left, "right": right, "bias": np.ones(5)}
    stored, scales = narrow(arrays)
    assert {k: list(a.shape) for k, a in scales.items()} == scale_shapes({k: a.shape for k, a in arrays.items()})
    wide = widen(stored, scales)
    assert np.all(np.abs(wide["left"] - left) <= 0.501 * np.abs(left).max(axis=0) / 127)
    assert np.all(np.abs(wide["right"] - right) <= 0.501 * np.abs(right).max(axis=1, keepdims=True) / 127)
    assert wide["bias"] is arrays["bias"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_a_quarter_of_the_bytes(method: str, tmp_path: Path) -> None:
    wide = compress(builtin_path(), tmp_path / "float", keep=0.5, method=method)
    report = compress(builtin_path(), tmp_path / "int8", keep=0.5, method=method, store="int8")
    assert report.store == "int8"
    assert report.n_after == wide.n_after
    assert report.bytes_after["other"] == wide.bytes_after["other"]
    assert wide.bytes_after["attention"] / 4 < report.bytes_after["attention"] < wide.bytes_after["attention"] / 3
    assert report.measured is not None
    assert wide.measured is not None
    assert abs(report.measured - wide.measured) < 0.02
    tensors = open_checkpoint(tmp_path / "int8").folder.tensors
    assert {info.dtype for name, info in tensors.items() if "tnlib" in name} == {"I8", "F32"}
    for before, after in zip(*(weights(tmp_path / name) for name in ("float", "int8")), strict=True):
        for name, weight in before.items():
            limit = (0.06 if method == "tucker" else 0.03) * np.linalg.norm(weight)
            assert 0 < np.linalg.norm(weight - after[name]) < limit


def test_the_whole_of_a_matrix_in_int8_is_plain_rounding(tmp_path: Path) -> None:
    compress(builtin_path(), tmp_path / "out", keep=1, method="matrix", store="int8")
    for before, after in zip(weights(builtin_path()), weights(tmp_path / "out"), strict=True):
        for name, weight in before.items():
            q, scale = round_slices(weight, 1)  # (in, out): a scale for every output
            np.testing.assert_allclose(after[name], q * scale.astype(float), rtol=1e-6)


def test_it_runs_and_is_nearly_what_it_was(tmp_path: Path) -> None:
    compress(builtin_path(), tmp_path / "out", keep=1, method="matrix", store="int8")
    tokens = np.random.default_rng(0).integers(1, 50, size=(2, 11))
    a, b = (run(open_checkpoint(folder), tokens).hidden for folder in (builtin_path(), tmp_path / "out"))
    assert 0 < np.linalg.norm(a - b) < 0.05 * np.linalg.norm(a)


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "llama"])
@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker", "cp"])
def test_transformers_computes_the_same_as_numpy(method: str, name: str, saved: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import tnlib_adapters.transformers_plugin  # noqa: F401
    from transformers import AutoModel

    compress(saved(name)[1], tmp_path / "out", keep=0.5, method=method, store="int8")
    tokens = np.random.default_rng(0).integers(1, 40, size=(2, 9))
    wanted = run(open_checkpoint(tmp_path / "out"), tokens).hidden
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert any(p.dtype == torch.int8 for p in model.parameters())
    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(tokens)).last_hidden_state.numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())

    again = tmp_path / "again"
    model.save_pretrained(again)
    assert (
        read_config(again)["quantization_config"]["layers"]
        == read_config(tmp_path / "out")["quantization_config"]["layers"]
    )
    reloaded = AutoModel.from_pretrained(again).eval()
    with torch.no_grad():
        same = reloaded(input_ids=torch.from_numpy(tokens)).last_hidden_state.numpy()
    np.testing.assert_array_equal(same, found)

    dense = model.dequantize().eval()
    with torch.no_grad():
        multiplied = dense(input_ids=torch.from_numpy(tokens)).last_hidden_state.numpy()
    np.testing.assert_allclose(multiplied, wanted, atol=1e-4 * np.abs(wanted).max())
    assert not any(p.dtype == torch.int8 for p in dense.parameters())


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with refused(ArgumentError, "compress: store must be one of float, int8", "'int4'"):
        compress(builtin_path(), tmp_path / "out", keep=0.5, store="int4")
    with refused(ArgumentError, "store='int8' needs layout 'factored'"):
        compress(builtin_path(), tmp_path / "out", keep=0.5, store="int8", layout="dense")
    assert not (tmp_path / "out").exists()


def test_damaged_scales_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(builtin_path(), out, keep=0.5, store="int8")
    config = read_config(out)
    piece = config["quantization_config"]["layers"][0][0]
    piece["scales"]["left"] = [7, 7]
    (out / "config.json").write_text(json.dumps(config))
    with refused(FileFormatError, "are damaged"):
        open_checkpoint(out)
    piece["scales"] = {}
    (out / "config.json").write_text(json.dumps(config))
    with refused(FileFormatError, "are damaged"):
        open_checkpoint(out)
    del piece["scales"]
    (out / "config.json").write_text(json.dumps(config))
    with refused(FileFormatError, "must be of F16, BF16, F32, F64, got I8"):
        open_checkpoint(out)


def test_a_scale_that_is_missing_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(builtin_path(), out, keep=0.5, store="int8")

    def drop(tensors: dict[str, Any]) -> None:
        del tensors[next(name for name in tensors if name.endswith("left_scale"))]

    change_tensors(out, drop)
    with refused(FileFormatError, "left_scale", "is missing"):
        open_checkpoint(out)
