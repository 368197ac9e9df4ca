"""Checkpoint folders: whatever save_pretrained writes opens, lazily; whatever is wrong is refused by name."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from attention_layers import same_layer
from checkpoint_folders import (
    CONFIG,
    INDEX,
    WEIGHTS,
    builtin_copy,
    change_config,
    change_tensors,
    entry,
    raw_file,
    shard,
)
from compressed_folders import by_options
from oracles import refused
from tnlib_adapters import (
    Budget,
    builtin_path,
    compress,
    evaluate,
    fold,
    inspect,
    open_checkpoint,
    rotate,
    save_checkpoint,
)
from tnlib_adapters.factors.projections import put_together, take_apart
from tnlib_adapters.files.safetensors_file import TensorInfo

from tnlib import ArgumentError, FileFormatError

QUERY = "layers.0.attention.query.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return builtin_copy(tmp_path / "model")


# -------------------------------------------------------------------------------------------------- what is opened


@pytest.mark.parametrize("name", ["gpt2", "gpt2_lm", "bert", "bert_masked"])
def test_projections_go_back_into_the_tensors_they_came_from(name: str, saved: Any) -> None:
    checkpoint = open_checkpoint(saved(name)[1])
    attention = checkpoint.wiring.layers[1].attention
    stored = {name: info.read() for name, info in checkpoint.folder.tensors.items()}
    seen = put_together(attention, take_apart(attention, stored.get))
    assert len(seen) == 2 * len(attention.projections)
    for tensor, values in seen.items():
        np.testing.assert_array_equal(values, stored[tensor])
        assert values.flags.c_contiguous


def test_the_masks_that_older_gpt2_files_hold_are_no_biases(saved: Any, tmp_path: Path) -> None:
    original = open_checkpoint(saved("gpt2")[1])
    folder = Path(shutil.copytree(saved("gpt2")[1], tmp_path / "gpt2"))
    mask = np.tril(np.ones((1, 1, 16, 16), np.float32))
    change_tensors(folder, lambda t: t.update({f"h.{layer}.attn.bias": mask for layer in range(3)}))
    for layer in range(3):
        same_layer(open_checkpoint(folder).attention(layer), original.attention(layer))


def test_a_layer_without_biases_has_none(folder: Path) -> None:
    change_tensors(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith(".bias") and "layers" in name])
    layer = open_checkpoint(folder).attention(0)
    assert layer.b_Q is layer.b_K is layer.b_V is layer.b_O is None
    x = np.random.default_rng(0).standard_normal((5, layer.d_model))
    assert not layer.frozen(np.ones((layer.n_heads, 5, 5))).constant.any()
    assert not layer.qk(0).left[-1].any()
    assert layer.scores(x).shape == (4, 5, 5)


def test_a_path_may_be_text(folder: Path) -> None:
    assert repr(open_checkpoint(str(folder))) == repr(open_checkpoint(folder))
    assert "2 layers, 4 heads of 16, d_model 64" in repr(open_checkpoint(folder))


# -------------------------------------------------------------------------------------------------------- laziness


def test_opening_reads_headers_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tensor data were read")

    monkeypatch.setattr(TensorInfo, "read_stored", refuse)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(AssertionError, match="data were read"):
        checkpoint.attention(0)


def test_a_layer_reads_its_own_tensors_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, read = [], TensorInfo.read_stored
    monkeypatch.setattr(TensorInfo, "read_stored", lambda info: seen.append(info.name) or read(info))
    open_checkpoint(folder).attention(1)
    assert len(seen) == 8
    assert all(name.startswith("layers.1.attention.") for name in seen)


def test_a_file_of_a_terabyte_opens(tmp_path: Path) -> None:
    d, layers = 2**17, 4  # 64 GiB per weight, none of it on the disk
    names = [
        f"layers.{layer}.attention.{m}.weight" for layer in range(layers) for m in ("query", "key", "value", "output")
    ]
    size = 4 * d * d
    header = {name: entry("F32", [d, d], k * size, (k + 1) * size) for k, name in enumerate(names)}
    end = len(names) * size
    header["embed.weight"] = entry("F32", [1, d], end, end + 4 * d)
    config = {"model_type": "tnlib_attention_only", "num_hidden_layers": layers, "num_attention_heads": 8}
    (tmp_path / CONFIG).write_text(json.dumps(config | {"hidden_size": d}))
    file = raw_file(tmp_path / WEIGHTS, header)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size + end + 4 * d)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("embed.weight").shape == (1, d)
    assert math.prod(checkpoint.folder.tensors[names[0]].shape) == d * d


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^open_checkpoint: folder .*nowhere.*check the path\.$"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match=r"found the file .*file; pass the folder that contains it, .*\.$"):
        open_checkpoint(tmp_path / "file")


def test_a_model_in_memory_is_to_be_saved_first(saved: Any) -> None:
    model, _ = saved("bert")
    with pytest.raises(TypeError, match=r"got a BertModel in memory; .*model\.save_pretrained\(folder\)"):
        open_checkpoint(model)


IN_CACHE = """
import sys
import tnlib_adapters
def refuse(event, _):
    if event.startswith("socket."):
        raise AssertionError(event)
sys.addaudithook(refuse)
for name in sys.argv[1:]:
    try:
        print(tnlib_adapters.open_checkpoint(name).folder.path)
    except FileNotFoundError as problem:
        print(problem)
"""


def test_a_name_of_the_hub_is_looked_up_in_the_local_cache(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads the place of the cache when it is imported."""
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "hub/models--someone--small"
    snapshot = builtin_copy(repository / "snapshots/0a1b2c")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0a1b2c")
    done = subprocess.run(
        [sys.executable, "-c", IN_CACHE, "someone/small", "someone/absent", "a--b/c"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_CACHE": str(tmp_path / "hub")},
        check=True,
    )
    found, absent, impossible = done.stdout.splitlines()
    assert found == str(snapshot)
    assert absent == (
        "open_checkpoint: folder must exist, found no folder at someone/absent; check the path, or, for a model on the "
        "hub, download it first: hf download someone/absent."
    )
    assert "found no folder at a--b/c" in impossible


@pytest.mark.parametrize("path", ["./absent", "../absent", "/absent/model"])
def test_a_path_gets_no_advice_for_names(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = f"open_checkpoint: folder must exist, found no folder at {path}; check the path."
    with pytest.raises(FileNotFoundError) as caught:
        open_checkpoint(path)
    assert str(caught.value) == wanted


def test_a_folder_with_a_file_of_llama_cpp_alone_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model.gguf")
    with refused(FileFormatError, "found model.gguf, which llama.cpp reads", "report"):
        open_checkpoint(folder)


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / CONFIG).unlink()
    with pytest.raises(FileNotFoundError, match=r"^open_checkpoint: found no config\.json in .*\.$"):
        open_checkpoint(folder)


def keep_bytes(folder: Path, count: int) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:count])


def set_tensor(name: str, values: np.ndarray | Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return lambda f: change_tensors(f, lambda t: t.update({name: values(t[name]) if callable(values) else values}))


def point_index(folder: Path, to: Any) -> None:
    index = shard(folder)
    content = json.loads(index.read_text())
    assert content["weight_map"][QUERY] == "two.safetensors"
    content["weight_map"][QUERY] = to
    index.write_text(json.dumps(content))


def pickle_only(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)


def two_homes(folder: Path) -> None:
    shard(folder)
    shutil.copy(folder / "one.safetensors", folder / "two.safetensors")


Break = Callable[[Path], Any]

BROKEN: dict[str, tuple[Break, tuple[str, ...]]] = {
    "config is no JSON": (lambda f: (f / CONFIG).write_text("{"), (CONFIG, "no JSON")),
    "config is too deep": (lambda f: (f / CONFIG).write_text("[" * 100_000), (CONFIG, "no JSON")),
    "config is a list": (lambda f: (f / CONFIG).write_text("[]"), (CONFIG, "JSON object", "list")),
    "config has NaN": (lambda f: change_config(f, layer_norm_epsilon=float("nan")), (CONFIG, "NaN")),
    "unknown architecture": (
        lambda f: change_config(f, model_type="mamba"),
        ("model_type", "bert, bloom, deepseek_v2", "tnlib_attention_only", "'mamba'"),
    ),
    "no architecture": (lambda f: change_config(f, model_type=...), ("model_type", "bert, bloom", "None")),
    "architecture is a list": (lambda f: change_config(f, model_type=["bert"]), ("model_type", "['bert']")),
    "another architecture": (lambda f: change_config(f, model_type="gpt2", n_layer=2, n_head=4, n_embd=64), ("wte",)),
    "no layer count": (lambda f: change_config(f, num_hidden_layers=...), ("num_hidden_layers", "None")),
    "no heads at all": (lambda f: change_config(f, num_attention_heads=0), ("num_attention_heads", "0")),
    "heads that do not divide": (lambda f: change_config(f, num_attention_heads=5), ("hidden_size", "64 and 5")),
    "more layers than stored": (lambda f: change_config(f, num_hidden_layers=3), ("layers.2.attention", "missing")),
    "a billion layers": (lambda f: change_config(f, num_hidden_layers=10**9), ("num_hidden_layers", "65,536")),
    "65,536 layers": (lambda f: change_config(f, num_hidden_layers=2**16), ("layers.2.attention", "missing")),
    "another width": (lambda f: change_config(f, hidden_size=32), (QUERY, "(32, 32)", "(64, 64)")),
    "weight of another shape": (set_tensor(QUERY, np.ones((64, 65), "f4")), (QUERY, "(64, 64)", "(64, 65)")),
    "bias of another shape": (
        set_tensor("layers.1.attention.key.bias", np.ones((64, 1), "f4")),
        ("layers.1.attention.key.bias", "(64,)", "(64, 1)"),
    ),
    "missing weight": (lambda f: change_tensors(f, lambda t: t.pop(QUERY)), (QUERY, "missing")),
    "missing embedding": (lambda f: change_tensors(f, lambda t: t.pop("embed.weight")), ("embed.weight",)),
    "truncated data": (lambda f: keep_bytes(f, -1), (WEIGHTS, "ends at byte")),
    "truncated header": (lambda f: keep_bytes(f, 100), (WEIGHTS, "header claims")),
    "empty file": (lambda f: keep_bytes(f, 0), (WEIGHTS, "the file has 0")),
    "index is no JSON": (lambda f: shard(f).write_text("nothing"), (INDEX, "no JSON")),
    "index without map": (lambda f: shard(f).write_text("{}"), (INDEX, "weight_map")),
    "index with an empty map": (lambda f: shard(f).write_text('{"weight_map": {}}'), (INDEX, "weight_map")),
    "index points up": (lambda f: point_index(f, "../model.safetensors"), (INDEX, "'../model.safetensors'", QUERY)),
    "index points away": (lambda f: point_index(f, "/etc/passwd"), (INDEX, "'/etc/passwd'", QUERY)),
    "index points to a folder": (lambda f: point_index(f, ".."), (INDEX, "'..'", QUERY)),
    "index points to a number": (lambda f: point_index(f, 1), (INDEX, "got 1", QUERY)),
    "index points to nothing": (lambda f: point_index(f, ""), (INDEX, "got ''", QUERY)),
    "shard of an impossible name": (lambda f: point_index(f, "a\0b"), (INDEX, "missing")),
    "shard of an endless name": (lambda f: point_index(f, "a" * 5000), (INDEX, "missing")),
    "shard missing": (lambda f: (shard(f), (f / "two.safetensors").unlink()), (INDEX, "two.safetensors", "missing")),
    "tensor in another shard": (lambda f: point_index(f, "one.safetensors"), (INDEX, "one.safetensors", QUERY)),
    "tensor in two shards": (two_homes, ("one.safetensors", "two.safetensors", "must stand in one file")),
    "pickled weights": (
        lambda f: pickle_only(f, "pytorch_model.bin"),
        ("pytorch_model.bin", "pickled", "convert", "safetensors"),
    ),
    "pickled checkpoint": (lambda f: pickle_only(f, "model.ckpt"), ("model.ckpt", "pickled", "convert")),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), (WEIGHTS, INDEX, "neither")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(case: str, folder: Path) -> None:
    break_it, words = BROKEN[case]
    break_it(folder)
    with refused(FileFormatError, "open_checkpoint: ", *words):
        open_checkpoint(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", [QUERY, "layers.0.attention.output.bias"])
def test_nan_and_inf_are_refused_with_the_name_of_the_tensor(name: str, bad: float, folder: Path) -> None:
    def spoil(values: np.ndarray) -> np.ndarray:
        values.flat[7] = bad
        return values

    set_tensor(name, spoil)(folder)
    checkpoint = open_checkpoint(folder)  # headers do not tell
    with refused(FileFormatError, repr(name), WEIGHTS, str(bad)):
        checkpoint.attention(0)
    checkpoint.attention(1)


def test_a_tensor_that_is_not_there_is_refused(folder: Path) -> None:
    with refused(FileFormatError, "Checkpoint.read", "'nothing.weight'"):
        open_checkpoint(folder).read("nothing.weight")


def test_a_pickle_beside_safetensors_is_not_looked_at(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert tnlib_adapters.open_checkpoint(folder).n_layers == 2


# ------------------------------------------------------------------------------------------- names that are no UTF-8


@pytest.fixture
def latin(tmp_path: Path) -> Path:
    """A folder whose path, files and links have names in Latin-1."""
    source = tmp_path / os.fsdecode(b"mod\xe8le")
    try:
        builtin_copy(source)
    except OSError:
        pytest.skip("file names of this system are UTF-8")
    (source / os.fsdecode(b"caf\xe9.txt")).write_text("copied")
    (source / os.fsdecode(b"caf\xe9.onnx")).write_text("left out")
    (source / os.fsdecode(b"d\xe9p\xf4t")).mkdir()
    (source / os.fsdecode(b"d\xe9p\xf4t/a.txt")).write_text("copied")
    return source


@pytest.mark.slow
def test_such_names_are_copied_and_reported(latin: Path, tmp_path: Path) -> None:
    report = compress(latin, tmp_path / "out", Budget(keep=0.5), what="attention")
    names = {b"caf\xe9.txt", b"d\xe9p\xf4t"}
    assert names < set(os.listdir(os.fsencode(tmp_path / "out")))
    assert report.left_out == [r"caf\xe9.onnx"]
    assert report.source.endswith(r"mod\xe8le")
    written = json.loads((tmp_path / "out/tnlib_report.json").read_text(encoding="utf-8"))
    assert (written["source"], written["left_out"]) == (report.source, report.left_out)
    assert r"mod\xe8le" in (tmp_path / "out/tnlib_report.html").read_text(encoding="utf-8")
    for name, change in {
        "fold": lambda model: fold(model).checkpoint,
        "rotate": lambda m: rotate(m, np.eye(64)),
    }.items():
        save_checkpoint(change(open_checkpoint(latin)), tmp_path / name)
        assert names < set(os.listdir(os.fsencode(tmp_path / name)))


@pytest.mark.slow  # draws all pictures of a page
def test_such_paths_are_inspected(latin: Path, tmp_path: Path) -> None:
    page = inspect(latin, tmp_path / "page").page.read_text(encoding="utf-8")
    assert r"<h1>Inside the model mod\xe8le</h1>" in page


def test_such_paths_are_refused_before_transformers_reads_them(latin: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shutil.rmtree(latin)
    shutil.copytree(builtin_path("llama"), latin)
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 500)
    stages: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        stages.append(stage)

    words = ("path in UTF-8", "mod\\udce8le", "rename")
    with refused(ArgumentError, *words):
        compress(latin, tmp_path / "out", **by_options(keep=0.5, calibrate=text, progress=progress))
    with refused(ArgumentError, *words):
        compress(builtin_path("llama"), latin / "out", **by_options(keep=0.5, calibrate=text, progress=progress))
    with refused(ArgumentError, "evaluate: ", *words):
        evaluate(latin, builtin_path("llama"), text, progress=progress)
    with refused(ArgumentError, "inspect: ", *words):
        inspect(latin, tmp_path / "page", text="def f(x)", progress=progress)
    assert set(stages) <= {"checking weights", "loading the model"}
    assert not {"out", "page"} & set(os.listdir(tmp_path))
