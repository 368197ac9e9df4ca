"""What a compressed folder holds beside its errors: numbers, names, dtypes, shards, other files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import CONFIG, INDEX, WEIGHTS, builtin_copy, change_tensors, raw_file
from compressed_folders import (
    attention_tensors,
    by_options,
    digest,
    metadata,
    n_attention,
    read_config,
    read_file,
    read_index,
    read_tensors,
)
from oracles import refused
from safetensors.numpy import load_file, save_file
from slow_cases import mostly_slow
from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint, save_checkpoint
from tnlib_adapters.compression.methods.method_table import METHODS
from tnlib_adapters.compression.write import encode_in_range as encoded

from tnlib import ArgumentError

MODELS = ["builtin", "bert", "bert_masked", "gpt2", "gpt2_lm"]
KEEPS = {"builtin": (1.0, 0.97, 0.5, 0.3, 0.05)}  # the others are smaller, and their steps wider
SMALL = (1.0, 0.8, 0.5, 0.3)

pytestmark = pytest.mark.usefixtures("without_pictures")


def copied(found: dict[str, Any], like: dict[str, Any], outside: Callable[[str], bool]) -> None:
    """All tensors outside the attention are there, the same to the last bit."""
    ours, theirs = ({name: t for name, t in one.items() if outside(name)} for one in (found, like))
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.values.tobytes() == theirs[name].values.tobytes()


# ---------------------------------------------------------------------------------------------- the promise of keep


KEPT = [(method, name) for method in METHODS for name in MODELS]


@pytest.mark.parametrize(("method", "name"), mostly_slow(KEPT, KEPT[::9]))
def test_what_is_stored_lies_at_most_one_percent_under_keep(
    method: str, name: str, folder_of: Any, tmp_path: Path
) -> None:
    """Numbers are counted in the files, factors and biases alike."""
    source = folder_of(name)
    before, untouched = n_attention(source), digest(source)
    for keep in KEEPS.get(name, SMALL):
        out = tmp_path / f"{keep}"
        report = compress(source, out, Budget(keep=keep), method=method, what="attention")
        after = n_attention(out)
        assert (keep - 0.01) * before <= after <= keep * before
        assert (report.n_before, report.n_after, report.kept) == (before, after, after / before)
        inside = set(attention_tensors(source)) | set(attention_tensors(out))
        copied(read_tensors(out), read_tensors(source), lambda tensor, inside=inside: tensor not in inside)
        weights = {tensor for tensor in attention_tensors(source) if tensor.endswith(".weight")}
        assert {attention_tensors(out)[tensor].values.size for tensor in weights} == {0}, "a place, and no weight"
    assert digest(source) == untouched


def test_a_head_may_lose_all_it_has(tmp_path: Path) -> None:
    """Factors of rank 0 are tensors without numbers."""
    report = compress(builtin_path(), tmp_path / "out", Budget(keep=0.005), what="attention")
    assert n_attention(tmp_path / "out") == report.n_after == 128  # the two output biases
    assert report.layers[0].qk_error == pytest.approx(1)
    for layer in range(2):
        assert not open_checkpoint(tmp_path / "out").attention(layer).W_Q.any()


# ------------------------------------------------------------------------------------------------ dtypes and shards


def saved_as(folder: Path, dtype: str, **options: Any) -> Any:
    models = pytest.importorskip("transformers_models")
    models.quiet()
    model = models.random_model("gpt2_lm").to(getattr(models.torch, dtype))
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("layout", mostly_slow(["factored", "dense"], ["factored"]))
@pytest.mark.parametrize("method", mostly_slow(METHODS, ["heads"]))
@pytest.mark.parametrize(("dtype", "short", "roundoff"), [("float16", "F16", 2**-10), ("bfloat16", "BF16", 2**-7)])
def test_half_precision_stays_half(
    dtype: str, short: str, roundoff: float, method: str, layout: str, tmp_path: Path
) -> None:
    """Factors are rounded once, and the report measures what rounding did."""
    saved_as(tmp_path / "in", dtype)
    keep = 1.0 if method != "cp" else 0.8
    report = compress(tmp_path / "in", tmp_path / "out", **by_options(keep=keep, method=method, layout=layout))
    tensors = read_tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {short}
    if layout == "factored":
        assert 0.99 * keep * n_attention(tmp_path / "in") <= n_attention(tmp_path / "out")
        assert report.bytes_after["attention"] == 2 * report.n_after
    if method != "cp":
        assert max(one.qk_error for one in report.layers) < 2 * roundoff
        assert method != "heads" or min(one.qk_error for one in report.layers) > roundoff / 20


@pytest.mark.parametrize("layout", mostly_slow(["factored", "dense"], ["factored"]))
@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], ["bfloat16"]))
@pytest.mark.parametrize("method", ["heads", "matrix"])
def test_shards_stay_shards(method: str, dtype: str, layout: str, tmp_path: Path) -> None:
    saved_as(tmp_path / "in", dtype, max_shard_size="12KB")
    source, out = tmp_path / "in", tmp_path / "out"
    compress(source, out, Budget(keep=0.5), method=method, layout=layout, what="attention")
    index, was = read_index(out), read_index(source)
    assert index is not None
    assert was is not None
    assert len(set(was["weight_map"].values())) > 3
    on_disk = {file.name: read_file(file) for file in out.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, held in on_disk.items() for name in held}
    assert all(on_disk.values()), "a shard without tensors"
    sizes = {"F32": 4, "BF16": 2}
    total = sum(t.values.size * sizes[t.dtype] for held in on_disk.values() for t in held.values())
    assert index["metadata"]["total_size"] == total
    inside = attention_tensors(source).keys()
    for name, file in was["weight_map"].items():
        if name not in inside:
            assert index["weight_map"][name] == file
    single = tmp_path / "single"
    saved_as(single, dtype)
    compress(single, tmp_path / "one", Budget(keep=0.5), method=method, layout=layout, what="attention")
    for name, tensor in read_tensors(tmp_path / "one").items():
        np.testing.assert_array_equal(tensor.values, read_tensors(out)[name].values)


def test_a_shard_of_attention_alone_leaves_no_empty_file(tmp_path: Path) -> None:
    source = builtin_copy(tmp_path / "in")
    tensors = load_file(source / WEIGHTS)
    (source / WEIGHTS).unlink()
    alone = ("key.weight", "output.weight")
    files = {name: "two.safetensors" if name.endswith(alone) else "one.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, source / file)
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for layout in ("factored", "dense"):
        compress(source, tmp_path / layout, Budget(keep=0.5), layout=layout, what="attention")
        index = read_index(tmp_path / layout)
        assert index is not None
        assert set(index["weight_map"].values()) == {"one.safetensors"}
        assert [file.name for file in (tmp_path / layout).glob("*.safetensors")] == ["one.safetensors"]
        open_checkpoint(tmp_path / layout).attention(1)


def test_an_index_beside_a_single_file_is_made_to_fit(tmp_path: Path) -> None:
    source = builtin_copy(tmp_path / "in")
    (source / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(read_tensors(source), WEIGHTS)}))
    compress(source, tmp_path / "out", Budget(keep=0.5), what="attention")
    index = read_index(tmp_path / "out")
    assert index is not None
    assert index["weight_map"] == dict.fromkeys(read_file(tmp_path / "out" / WEIGHTS), WEIGHTS)


def test_tensors_of_other_kinds_are_copied_bit_for_bit(tmp_path: Path) -> None:
    """Integers, booleans and doubles beside the weights, and values that only look like weights' names."""
    source = builtin_copy(tmp_path / "in")
    others = {
        "steps": np.array(7),
        "mask": np.array([True, False]),
        "ids": np.arange(5, dtype="i8"),
        "layers.0.attention.bias": np.ones((2, 2), "u1"),
        "empty": np.zeros((0, 3), "f4"),
        "wide": np.array([1e300, 5e-324]),
    }
    change_tensors(source, lambda tensors: tensors.update(others))
    compress(source, tmp_path / "out", Budget(keep=0.5), what="attention")
    found = load_file(tmp_path / "out" / WEIGHTS)
    for name, value in others.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape or value.ndim == 0
        assert found[name].tobytes() == value.tobytes()


def with_metadata(folder: Path, values: dict[str, str] | None) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    raw_file(folder / WEIGHTS, ({} if values is None else {"__metadata__": values}) | header, raw[8 + length :])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [({"format": "pt", "author": "a \u00e9"}, {"format": "pt", "author": "a \u00e9"}), (None, {"format": "pt"})],
)
def test_metadata_is_kept(values: dict[str, str] | None, wanted: dict[str, str], tmp_path: Path) -> None:
    """transformers refuses a file without a format."""
    source = builtin_copy(tmp_path / "in")
    with_metadata(source, values)
    compress(source, tmp_path / "out", Budget(keep=0.5), what="attention")
    assert metadata(tmp_path / "out" / WEIGHTS) == wanted


# ----------------------------------------------------------------------------------- numbers that a dtype cannot hold


def enlarged(folder: Path, factor: float, dtype: str) -> Path:
    """The built-in model with large attention weights, all within the range of its dtype."""
    builtin_copy(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in read_tensors(folder).items():
        values = tensor.values
        if "attention" in name:
            values = factor * values / np.abs(values).max()
        half = values.astype("<f2") if dtype == "F16" else (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + half.nbytes],
        }
        data += half.tobytes()
    raw_file(folder / WEIGHTS, header, data)
    return folder


@pytest.mark.parametrize("layout", ["factored", "dense"])
@pytest.mark.parametrize("method", mostly_slow(METHODS, ["matrix"]))
def test_numbers_beyond_the_dtype_are_refused_by_name(method: str, layout: str, tmp_path: Path) -> None:
    """Formats that gather the norm of all weights in one factor need more range than the weights did."""
    gathers = layout == "factored" and method in ("ttm", "tucker", "cp")
    source = enlarged(tmp_path / "in", 6e4 if gathers else 3e4, "F16")
    untouched = digest(source)
    if gathers:
        with refused(ArgumentError, "compress: tensor 'layers.0.attention.tnlib.q", "dtype F16", "F32"):
            compress(source, tmp_path / "out", Budget(keep=0.6), method=method, layout=layout, what="attention")
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
    else:
        compress(source, tmp_path / "out", Budget(keep=0.6), method=method, layout=layout, what="attention")
        assert all(np.isfinite(tensor.values).all() for tensor in read_tensors(tmp_path / "out").values())
    assert digest(source) == untouched


@pytest.mark.parametrize("method", METHODS)
def test_bf16_has_the_range(method: str, tmp_path: Path) -> None:
    compress(enlarged(tmp_path / "in", 1e30, "BF16"), tmp_path / "out", **by_options(keep=0.6, method=method))
    tensors = attention_tensors(tmp_path / "out").values()
    assert all(np.isfinite(tensor.values).all() for tensor in tensors)
    assert max(np.abs(tensor.values).max(initial=0.0) for tensor in tensors) > 1e12


@pytest.mark.parametrize(
    ("dtype", "largest"), [("F16", 65504.0), ("BF16", 255 * 2.0**120), ("F32", 2.0**128 - 2.0**104)]
)
def test_the_largest_number_of_a_dtype_is_still_stored(dtype: str, largest: float) -> None:
    """What rounds down to it is, what rounds up to inf is not."""
    step = largest * {"F16": 2**-11, "BF16": 2**-8, "F32": 2**-24}[dtype]
    for value in (largest, -largest, largest + 0.4 * step):
        assert encoded("t", np.array([1.0, value]), dtype).shape == (2,)
    for value in (1.001 * (largest + step), -1e300):
        with refused(ArgumentError, "'t'", f"{abs(value):.3g}", dtype):
            encoded("t", np.array([1.0, value]), dtype)


def test_the_refusal_names_the_factor_and_its_size(tmp_path: Path) -> None:
    source = enlarged(tmp_path / "in", 6e4, "F16")
    with refused(ArgumentError, "'layers.0.attention.tnlib.qkvo_core'", "F16", "use another method or layout"):
        compress(source, tmp_path / "out", Budget(keep=0.6), method="tucker", what="attention")


# ------------------------------------------------------------------------------------------------------- other files


def test_other_files_come_along_and_other_weights_do_not(tmp_path: Path) -> None:
    source = builtin_copy(tmp_path / "in")
    untouched_names = {
        "tokenizer.json": "{}",
        "vocab.txt": "a\nb",
        "1_Pooling/config.json": '{"pooling": true}',
        "2_Dense/model.safetensors": "weights of another module",
        "2_Dense/pytorch_model.bin": "weights of another module",
        "deep/er/notes.md": "notes",
        "spaces and \u00e9.txt": "text",
        "tnlib_report.json": "an old report, replaced",
    }
    others = ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.ckpt", "w.pt",
              "extra.safetensors", "onnx/model.onnx", "onnx/model.onnx_data", "openvino/openvino_model.bin",
              "onnx/config.json", "model.gguf", "coreml/deep/weights.bin"]  # fmt: skip
    for name, text in (untouched_names | dict.fromkeys(others, "weights")).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    untouched = digest(source)
    report = compress(source, tmp_path / "out", Budget(keep=0.5), what="attention")
    assert sorted(report.left_out) == sorted(others)
    assert json.loads((tmp_path / "out/tnlib_report.json").read_text())["left_out"] == report.left_out
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {*untouched_names, "README.md", CONFIG, WEIGHTS, "tnlib_report.html"}
    for name in untouched_names.keys() - {"tnlib_report.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert digest(source) == untouched


def test_links_become_files_and_hidden_files_stay(tmp_path: Path) -> None:
    """A hub's cache holds links into its store of blobs; OUT stands on its own."""
    (tmp_path / "models--a--b/snapshots").mkdir(parents=True)
    source, blobs = builtin_copy(tmp_path / "models--a--b/snapshots/main"), tmp_path / "models--a--b/blobs"
    blobs.mkdir()
    for name in (WEIGHTS, CONFIG, "README.md"):
        shutil.move(source / name, blobs / name)
        (source / name).symlink_to(Path("../../blobs") / name)
    (source / "tokens").mkdir()
    (source / "tokens/vocab.txt").write_text("a")
    (source / "tokens/round").symlink_to(source)
    (source / "1_Tokens").symlink_to("tokens")
    (source / ".git").mkdir()
    (source / ".git/config").write_text("private")
    (source / ".cache.txt").write_text("private")
    untouched = digest(source)
    assert compress(source, tmp_path / "out", Budget(keep=0.5), what="attention").left_out == []
    shutil.rmtree(blobs)
    files = list((tmp_path / "out").rglob("*"))
    assert not any(path.is_symlink() for path in files)
    expected = {WEIGHTS, CONFIG, "README.md", "1_Tokens", "tokens", "vocab.txt"}
    assert {path.name for path in files} == expected | {"tnlib_report.json", "tnlib_report.html"}
    open_checkpoint(tmp_path / "out").attention(0)
    assert digest(source) == untouched


@pytest.mark.parametrize("write", ["compress", "save_checkpoint"])
def test_what_is_no_file_of_the_folder_is_not_copied(write: str, tmp_path: Path) -> None:
    """A link to a private folder, to an endless file or to nowhere, and a pipe that nobody writes to."""
    source, elsewhere = builtin_copy(tmp_path / "in"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "id_rsa").write_text("private")
    (source / "docs").symlink_to(elsewhere)
    (source / "notes.txt").symlink_to(elsewhere / "id_rsa")
    (source / "merges.txt").symlink_to("/dev/zero")
    (source / "vocab.txt").symlink_to("nowhere")
    os.mkfifo(source / "added_tokens.json")
    (source / "tokens.txt").write_text("a")
    (source / "special.txt").symlink_to("tokens.txt")
    if write == "compress":
        left_out = compress(source, tmp_path / "out", Budget(keep=0.5), what="attention").left_out
        assert sorted(left_out) == ["added_tokens.json", "docs", "merges.txt", "notes.txt", "vocab.txt"]
    else:
        save_checkpoint(open_checkpoint(source), tmp_path / "out")
    found = {path.name for path in (tmp_path / "out").rglob("*")} - {"tnlib_report.json", "tnlib_report.html"}
    assert found == {WEIGHTS, CONFIG, "README.md", "tokens.txt", "special.txt"}
    assert (tmp_path / "out/special.txt").read_text() == "a"


def test_config_keeps_what_it_said(tmp_path: Path) -> None:
    source = builtin_copy(tmp_path / "in")
    config = read_config(source) | {"note": "\u00fcber", "nested": {"a": [1, 2.5, None]}}
    (source / CONFIG).write_text(json.dumps(config))
    for layout in ("factored", "dense"):
        compress(source, tmp_path / layout, Budget(keep=0.5), layout=layout, what="attention")
        found = read_config(tmp_path / layout)
        for key in ("quantization_config", "transformers_weights"):
            assert (found.pop(key, None) is not None) == (layout == "factored")
        assert found == config
