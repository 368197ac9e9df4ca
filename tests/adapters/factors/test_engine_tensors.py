"""Weights in integers of engines: bits where each format puts them, and folders of other writers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import scheme_of
from hypothesis import given
from hypothesis import strategies as st
from oracles import refused
from tnlib_adapters.factors.engine_tensors import (
    COMPRESSED_TENSORS,
    DESCRIBE,
    ENCODE,
    GPTQ,
    stored_shapes,
    with_dequantized,
)
from tnlib_adapters.factors.integers import BITS, IntegerFormat, Integers
from tnlib_adapters.factors.rounding import round_to_nearest
from tnlib_adapters.files.folder import open_folder
from tnlib_adapters.files.safetensors_file import Entry, write_tensor_file

from tnlib import ArgumentError, FileFormatError

STORED_AS = (GPTQ, COMPRESSED_TENSORS)
formats = st.builds(IntegerFormat, st.sampled_from(BITS), st.just(0), st.sampled_from((0, 32)), st.just(True))


def rounded(form: IntegerFormat, seed: int = 0) -> Integers:
    return round_to_nearest(np.random.default_rng(seed).standard_normal((96, 64)), form)


def entries(stored_as: str, module: str, integers: Integers) -> list[Entry]:
    own = ENCODE[stored_as](integers)
    shapes = {name: (dtype, array.shape) for name, (dtype, array) in own.items()}
    assert shapes == stored_shapes(stored_as, integers.format, integers.codes.shape)
    return [Entry(f"{module}.{name}", dtype, array) for name, (dtype, array) in own.items()]


def opened(folder: Path, config: Mapping[str, Any], tensors: list[Entry]) -> Any:
    """The tensors of a folder with these tensors, as `open_checkpoint` sees them."""
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    list(write_tensor_file(folder / "model.safetensors", tensors, {}))
    return with_dequantized(open_folder(folder)).tensors


@pytest.mark.parametrize("stored_as", STORED_AS)
@given(form=formats, seed=st.integers(0, 99))
def test_written_weights_are_read_bit_for_bit(
    stored_as: str, form: IntegerFormat, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    integers, config = rounded(form, seed), DESCRIBE[stored_as]({"m": form})
    bias = Entry("m.bias", "F32", np.ones(64, np.float32))
    tensors = opened(tmp_path_factory.mktemp("folder"), config, [*entries(stored_as, "m", integers), bias])
    assert set(tensors) == {"m.weight", "m.bias"}
    weight = tensors["m.weight"]
    assert np.array_equal(weight.read(), integers.values().T)
    assert np.array_equal(weight.read_part((slice(3, 9), slice(40, 41))), integers.values().T[3:9, 40:41])


FUSED = {"layers.{}.attention": ("q", "k", "v"), "layers.{}": ("gate", "up")}  # one parent is inside of the other
OTHERS = {"layers.{}.attention": ("o",), "layers.{}": ("down",)}


@given(st.lists(st.lists(formats, min_size=4, max_size=4), min_size=1, max_size=12))
def test_every_layer_is_found_in_the_config_fused_layers_too(layers: list[list[IntegerFormat]]) -> None:
    """vLLM and SGLang look up queries, keys and values of GPTQ under a name that is not in the file."""
    modules, fused = dict[str, IntegerFormat](), dict[str, IntegerFormat]()
    for k, forms in enumerate(layers):
        drawn = iter(forms)
        for parent, members in FUSED.items():
            shared, other = next(drawn), next(drawn)
            modules |= {f"{parent.format(k)}.{name}": shared for name in members}
            modules |= {f"{parent.format(k)}.{name}": other for name in OTHERS[parent]}
            fused[f"{parent.format(k)}.{'_'.join(members)}"] = shared
    section = DESCRIBE[GPTQ](modules)
    by_name = section | {"dynamic": dict(sorted(section.get("dynamic", {}).items()))}  # as transformers writes it
    for name, form in (modules | fused).items():
        assert scheme_of(section, name) == scheme_of(by_name, name) == (form.bits, form.group)
    for name, form in modules.items():
        assert scheme_of(section, f"{name}.qweight") == (form.bits, form.group)
        assert scheme_of(DESCRIBE[COMPRESSED_TENSORS](modules), name) == (form.bits, form.group)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_one_stream_of_bits_along_the_inputs(bits: int) -> None:
    integers = rounded(IntegerFormat(bits, 0, 32, has_zero=True))
    wanted = integers.codes.astype(int) + (128 if bits == 8 else 0)
    for stored_as, name in ((GPTQ, "m.qweight"), (COMPRESSED_TENSORS, "m.weight_packed")):
        words = next(entry.values for entry in entries(stored_as, "m", integers) if entry.name == name)
        columns = words.T if stored_as == GPTQ else words  # out, words
        for column in (0, 63):
            stream = int.from_bytes(np.ascontiguousarray(columns[column]).tobytes(), "little")
            assert [stream >> (bits * k) & (2**bits - 1) for k in range(96)] == wanted[:, column].tolist()


def test_scales_of_either_sign_serve_the_longer_tail() -> None:
    form = IntegerFormat(2, 0, has_zero=True)
    tail = np.array([[-1.0, 1.0], [-0.5, 0.5], [0.5, -0.5]])  # its values are four levels of the grid, or minus them
    integers = round_to_nearest(tail, form)
    assert np.array_equal(integers.values(), tail)
    assert integers.scales.tolist() == [[0.5, -0.5]]


def test_gptq_in_another_order_of_inputs_with_zeros_of_its_own(tmp_path: Path) -> None:
    """Version 1 stores zeros less one."""
    generator = np.random.default_rng(3)
    codes, zeros = generator.integers(0, 16, (32, 32)), generator.integers(1, 16, (4, 32))
    scales, groups = generator.standard_normal((4, 32)).astype(np.float16), generator.integers(0, 4, 32)

    def words(values: Any) -> Any:
        return (values.reshape(-1, 8) << np.arange(0, 32, 4)).sum(1).astype(np.uint32).view(np.int32)

    for version, stored in (("gptq", zeros - 1), ("gptq_v2", zeros)):
        tensors = [
            Entry("m.qweight", "I32", words(codes.T).reshape(32, 4).T.copy()),
            Entry("m.qzeros", "I32", words(stored).reshape(4, 4)),
            Entry("m.scales", "F16", scales),
            Entry("m.g_idx", "I32", groups.astype(np.int32)),
        ]
        found = opened(tmp_path, {"quant_method": "gptq", "bits": 4, "checkpoint_format": version}, tensors)
        wanted = (codes - zeros[groups]) * scales.astype(np.float32)[groups]
        assert np.array_equal(found["m.weight"].read(), wanted.T)


def test_what_onnxruntime_has_no_operator_for_is_refused(tmp_path: Path) -> None:
    onnx_integers = pytest.importorskip("tnlib_adapters.transformers_plugin.onnx_export")
    form = IntegerFormat(4, 0, 32, has_zero=True)
    changes = {
        "consecutive": ("m.g_idx", lambda stored: stored[::-1]),
        "code of 0": ("m.qzeros", lambda stored: -stored),
    }
    for word, (name, change) in {"": ("", None), **changes}.items():
        tensors = [
            entry._replace(values=np.ascontiguousarray(change(entry.values))) if entry.name == name else entry
            for entry in entries(GPTQ, "m", rounded(form))
        ]
        weights = opened(tmp_path, DESCRIBE[GPTQ]({"m": form}), tensors)
        if not word:
            onnx_integers.check_weights(weights)
            continue
        with refused(ArgumentError, word):
            onnx_integers.check_weights(weights)


def test_zeros_of_compressed_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers").pack_to_int32
    generator = np.random.default_rng(4)
    codes, zeros = (generator.integers(-4, 4, shape).astype(np.int8) for shape in ((32, 40), (32, 2)))
    scales = generator.standard_normal((32, 2)).astype(np.float32)
    tensors = [
        Entry("m.weight_packed", "I32", pack(torch.from_numpy(codes), 3).numpy()),
        Entry("m.weight_scale", "F32", scales),
        Entry("m.weight_zero_point", "I32", pack(torch.from_numpy(zeros), 3, packed_dim=0).numpy()),
        Entry("m.weight_shape", "I64", np.array([32, 40])),
    ]
    found = opened(tmp_path, {"quant_method": "compressed-tensors"}, tensors)["m.weight"].read()
    assert np.array_equal(found, (codes - np.repeat(zeros, 20, 1).astype(np.float32)) * np.repeat(scales, 20, 1))


@pytest.mark.parametrize("stored_as", STORED_AS)
@pytest.mark.parametrize("change", ["cut", "leave out", "dtype", "flat", "group", "indivisible", "nan"])
def test_damaged_integers_are_refused_by_name(stored_as: str, change: str, tmp_path: Path) -> None:
    form = IntegerFormat(4, 0, 20 if change == "indivisible" else 32, has_zero=True)
    tensors = {entry.name: entry for entry in entries(stored_as, "m", rounded(form))}
    scale = "m.scales" if stored_as == GPTQ else "m.weight_scale"
    codes = "m.qweight" if stored_as == GPTQ else "m.weight_packed"
    if change == "cut":
        tensors[codes] = tensors[codes]._replace(values=tensors[codes].values[:-1, :-1].copy())
    elif change == "leave out":
        del tensors[scale]
    elif change == "dtype":
        tensors[scale] = Entry(scale, "I32", tensors[codes].values)
    elif change == "flat":
        tensors[codes] = tensors[codes]._replace(values=tensors[codes].values.ravel())
    elif change == "indivisible":  # and no groups of the inputs
        tensors.pop("m.g_idx", None)
    elif change == "nan":
        tensors[scale] = Entry(scale, "F32", np.full(tensors[scale].values.shape, np.nan, np.float32))
    elif stored_as == GPTQ:
        tensors["m.g_idx"] = tensors["m.g_idx"]._replace(values=np.full(96, 7, np.int32))
    else:
        tensors["m.weight_shape"] = tensors["m.weight_shape"]._replace(values=np.array([64, 0]))
    with pytest.raises(FileFormatError, match="m"):
        opened(tmp_path, DESCRIBE[stored_as]({"m": form}), [*tensors.values()])["m.weight"].read()
