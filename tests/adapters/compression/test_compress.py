"""A folder in, a smaller folder out: what --keep promises, counted in the written bytes, and what the model becomes."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import builtin_copy, change_config, change_tensors, shard
from compressed_folders import PAGE as WRITE_PAGE
from compressed_folders import (
    attention_tensors,
    dense_layers,
    digest,
    leave_out_page,
    metadata,
    n_attention,
    read_config,
    read_index,
    read_tensors,
    relative,
)
from oracles import refused
from safetensors.numpy import load_file, save_file
from slow_cases import mostly_slow
from tnlib_adapters import builtin_path, compress, open_checkpoint
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import loss, run

from tnlib import ArgumentError, FileFormatError

MODELS = ["builtin", "bert", "gpt2_lm"]
METHODS = ["heads", "matrix", "ttm", "tucker", "cp"]
LAYOUTS = ["factored", "dense"]
REPORT, PAGE = "tnlib_report.json", "tnlib_report.html"
MEASURE = "loss on repeated segments (nats)"

Compressed = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def without_pictures() -> Iterator[None]:
    """Drawing takes most of the time of a small compression; one test below has the real page."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_page(patch)
        patch.setattr("tnlib_adapters.compression.evaluation.evaluate.SEQUENCES", 60)
        yield


@pytest.fixture(scope="module")
def sources(saved: Callable[[str], Any]) -> Callable[[str], Path]:
    return lambda name: builtin_path() if name == "builtin" else saved(name)[1]


@pytest.fixture(scope="module")
def compressed(sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Compressed:
    """(model, keep, method, layout) -> OUT, made once."""
    base, made = tmp_path_factory.mktemp("compressed"), {}

    def get(model: str, keep: float = 0.5, method: str = "heads", layout: str = "factored") -> Path:
        key = (model, keep, method, layout)
        if key not in made:
            out = base / "-".join(map(str, key))
            untouched = digest(sources(model))
            try:
                report = compress(sources(model), out, keep=keep, method=method, layout=layout)
            except ArgumentError as problem:  # small models have few sizes to choose from; the message names one
                named = re.search(r"the nearest below it is (\d\.\d+)", str(problem))
                if named is None:
                    raise
                report = compress(sources(model), out, keep=float(named[1]), method=method, layout=layout)
            assert digest(sources(model)) == untouched
            assert json.loads((out / REPORT).read_text()) == json.loads(report.to_json())
            made[key] = out
        return made[key]

    return get


def written_report(out: Path) -> dict[str, Any]:
    return json.loads((out / REPORT).read_text())


def beside(out: Path) -> set[str]:
    return {path.name for path in out.parent.iterdir()}


def operators(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Each head's QK and OV operator, and its layer's output bias."""
    checkpoint = open_checkpoint(folder)
    for layer in range(checkpoint.n_layers):
        attention = checkpoint.attention(layer)
        for head in range(len(attention.W_Q)):
            yield attention.qk(head).full(), attention.ov(head).full(), attention.b_O


def hidden(folder: Path) -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    tokens = np.random.default_rng(3).integers(0, 50, size=(2, 12))
    got = run(checkpoint, tokens)
    return got.hidden if got.logits is None else got.logits


# ------------------------------------------------------------------------------------------------- what is promised


@pytest.mark.parametrize("keep", mostly_slow([1.0, 0.7, 0.5], [0.5]))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_keep_counts_every_number_that_is_stored(
    model: str, method: str, keep: float, compressed: Compressed, sources: Callable[[str], Path]
) -> None:
    out, source = compressed(model, keep, method), sources(model)
    before, after, report = n_attention(source), n_attention(out), written_report(out)
    assert keep - 0.1 < report["keep"] <= keep
    keep = report["keep"]
    assert (keep - 0.01) * before <= after <= keep * before
    assert (report["n_before"], report["n_after"]) == (before, after)
    assert report["kept"] == after / before
    assert sum(layer["n_before"] for layer in report["layers"]) == before
    assert sum(layer["n_after"] for layer in report["layers"]) == after


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, ["factored"]))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_everything_kept_is_the_same_model(
    model: str, method: str, layout: str, compressed: Compressed, sources: Callable[[str], Path]
) -> None:
    out, source = compressed(model, 1.0, method, layout), sources(model)
    for old, new in zip(operators(source), operators(out), strict=True):
        assert all(relative(a, b) < 2e-6 for a, b in zip(old, new, strict=True))
    assert relative(hidden(source), hidden(out)) < 1e-5
    assert all(max(head["qk_error"], head["ov_error"]) < 2e-6 for head in written_report(out)["heads"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_both_layouts_hold_the_same_attention(model: str, method: str, compressed: Compressed) -> None:
    factored, dense = (compressed(model, 0.5, method, layout) for layout in LAYOUTS)
    for ours, theirs in zip(operators(factored), operators(dense), strict=True):
        assert all(relative(a, b) < 2e-6 for a, b in zip(ours, theirs, strict=True))
    assert relative(hidden(factored), hidden(dense)) < 1e-5
    reports = [written_report(out) for out in (factored, dense)]
    for ours, theirs in zip(*(report["heads"] for report in reports), strict=True):
        assert ours["qk_error"] == pytest.approx(theirs["qk_error"], abs=1e-5)
        assert ours["ov_error"] == pytest.approx(theirs["ov_error"], abs=1e-5)
    assert [report["layout"] for report in reports] == LAYOUTS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_a_dense_folder_has_the_names_and_shapes_it_came_with(
    model: str, method: str, compressed: Compressed, sources: Callable[[str], Path]
) -> None:
    old, new = read_tensors(sources(model)), read_tensors(compressed(model, 0.5, method, "dense"))
    assert {n: (s.dtype, s.values.shape) for n, s in old.items()} == {
        n: (s.dtype, s.values.shape) for n, s in new.items()
    }
    assert read_config(sources(model)) == read_config(compressed(model, 0.5, method, "dense"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_but_attention_changes(
    model: str, method: str, layout: str, compressed: Compressed, sources: Callable[[str], Path]
) -> None:
    source, out = sources(model), compressed(model, 0.5, method, layout)
    old, new = read_tensors(source), read_tensors(out)
    others = old.keys() - attention_tensors(source).keys()
    assert others == new.keys() - attention_tensors(out).keys()
    for name in others:
        assert old[name].dtype == new[name].dtype
        np.testing.assert_array_equal(old[name].values, new[name].values)
    assert metadata(out / "model.safetensors") == metadata(source / "model.safetensors")
    rewritten = {"model.safetensors", "config.json", "README.md"}
    for name, content in digest(source).items():
        assert name in rewritten or digest(out)[name] == content
    assert digest(out).keys() == digest(source).keys() | {REPORT, PAGE, "README.md"}
    card = source / "README.md"
    assert not card.exists() or (out / "README.md").read_bytes().endswith(card.read_bytes()[-20:])
    config = read_config(out)
    config.pop("quantization_config", None)
    assert config == read_config(source)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_reported_errors_are_those_of_the_written_weights(
    model: str, method: str, compressed: Compressed, sources: Callable[[str], Path]
) -> None:
    """Operators multiplied out from the bytes of both folders, biases included."""
    out = compressed(model, 0.5, method, "dense")
    report, heads = written_report(out), iter(written_report(out)["heads"])
    assert report["method"] == method
    for layer, (old, new) in enumerate(zip(dense_layers(sources(model)), dense_layers(out), strict=True)):
        for kind, a, b in zip(("qk", "ov"), old.operators(), new.operators(), strict=True):
            whole = relative(np.stack(a), np.stack(b))
            assert report["layers"][layer][f"{kind}_error"] == pytest.approx(whole, rel=1e-6, abs=1e-7)
        for head, parts in enumerate(zip(*old.operators(), *new.operators(), strict=True)):
            told = next(heads)
            assert (told["layer"], told["head"]) == (layer, head)
            assert told["qk_error"] == pytest.approx(relative(parts[0], parts[2]), rel=1e-6, abs=1e-7)
            assert told["ov_error"] == pytest.approx(relative(parts[1], parts[3]), rel=1e-6, abs=1e-7)
            np.testing.assert_allclose(
                told["qk_spectrum"],
                np.linalg.svd(parts[0], compute_uv=False)[: len(told["qk_spectrum"])],
                atol=1e-6 * told["qk_spectrum"][0],
            )
    assert next(heads, None) is None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_smaller_fraction_errs_more(model: str, method: str, compressed: Compressed) -> None:
    def worst(keep: float) -> float:
        layers = written_report(compressed(model, keep, method))["layers"]
        return math.sqrt(sum(layer["qk_error"] ** 2 + layer["ov_error"] ** 2 for layer in layers))

    assert worst(1.0) < 1e-5 < worst(0.7) < worst(0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_reported_bytes_are_those_on_disk(
    model: str, layout: str, compressed: Compressed, sources: Callable[[str], Path]
) -> None:
    out, source = compressed(model, 0.5, "matrix", layout), sources(model)
    report = written_report(out)
    for folder, told in ((source, report["bytes_before"]), (out, report["bytes_after"])):
        raw = (folder / "model.safetensors").read_bytes()
        assert sum(told.values()) == len(raw) - 8 - int.from_bytes(raw[:8], "little")
        assert told["attention"] == 4 * n_attention(folder)  # F32
    before, after = ((folder / "model.safetensors").stat().st_size for folder in (source, out))
    saved = 4 * (n_attention(source) - n_attention(out))
    assert (saved > 0) == (layout == "factored")
    assert abs(before - after - saved) < 4096  # the headers differ


# ------------------------------------------------------------------------------------------------ the built-in model


@pytest.fixture(scope="module")
def measured() -> Callable[[Path], float]:
    tokens, repeated = repeated_segments(60, rng=np.random.default_rng(77))
    return functools.cache(lambda folder: loss(open_checkpoint(folder), tokens, repeated))


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_of_the_built_in_model(method: str, compressed: Compressed, measured: Callable[[Path], float]) -> None:
    before = measured(builtin_path())
    assert before < 0.5
    halves = [measured(compressed("builtin", 0.5, method, layout)) for layout in LAYOUTS]
    assert halves[0] == pytest.approx(halves[1], rel=1e-5)
    assert halves[0] > before + 0.01
    for layout in LAYOUTS:
        assert measured(compressed("builtin", 1.0, method, layout)) == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_quality_in_the_report(method: str, compressed: Compressed, measured: Callable[[Path], float]) -> None:
    """On sequences of another seed than the ones here: the same to the spread of the mean."""
    reports = {keep: written_report(compressed("builtin", keep, method))["quality"] for keep in (0.5, 1.0)}
    for keep, quality in reports.items():
        assert quality.keys() == {f"{MEASURE}, before", f"{MEASURE}, after"}
        assert quality[f"{MEASURE}, before"] == pytest.approx(measured(builtin_path()), abs=0.1)
        after = measured(compressed("builtin", keep, method))
        assert quality[f"{MEASURE}, after"] == pytest.approx(after, rel=0.15, abs=0.1)
    assert reports[1.0][f"{MEASURE}, after"] == pytest.approx(reports[1.0][f"{MEASURE}, before"], rel=1e-5)


def test_no_quality_where_no_text_is_at_hand(compressed: Compressed) -> None:
    assert written_report(compressed("bert"))["quality"] == {}


# ----------------------------------------------------------------------------------------------- sources of all kinds


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_stay_shards(layout: str, tmp_path: Path) -> None:
    source = builtin_copy(tmp_path / "in")
    compress(source, tmp_path / "whole", keep=0.5, layout=layout)
    shard(source)
    untouched = digest(source)
    compress(source, tmp_path / "out", keep=0.5, layout=layout)
    assert digest(source) == untouched

    index, old = read_index(tmp_path / "out"), read_index(source)
    assert index is not None
    assert old is not None
    files = {file: load_file(tmp_path / "out" / file) for file in set(index["weight_map"].values())}
    assert files.keys() == set(old["weight_map"].values())
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    assert index["metadata"]["total_size"] == sum(a.nbytes for held in files.values() for a in held.values())
    together = {name: a for held in files.values() for name, a in held.items()}
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert together.keys() == whole.keys()
    for name, values in whole.items():
        np.testing.assert_array_equal(together[name], values)
    assert digest(tmp_path / "out").keys() == digest(source).keys() | {REPORT, PAGE}


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, ["factored"]))
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_stays_half_precision(dtype: str, layout: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    source, kind = builtin_copy(tmp_path / "in"), {"F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    tensors = load(source / "model.safetensors")
    save({name: a.to(kind) for name, a in tensors.items()}, source / "model.safetensors")
    report = compress(source, tmp_path / "out", keep=0.5, layout=layout)
    stored = attention_tensors(tmp_path / "out")
    assert {one.dtype for one in stored.values()} == {dtype}
    if layout == "factored":
        assert sum(one.values.size for one in stored.values()) <= 0.5 * n_attention(source)
    compress(builtin_path(), tmp_path / "wide", keep=0.5, layout="dense")
    step = {"F16": 2**-11, "BF16": 2**-8}[dtype]
    for ours, wide in zip(operators(tmp_path / "out"), operators(tmp_path / "wide"), strict=True):
        assert all(relative(b, a) < 20 * step for a, b in zip(ours, wide, strict=True))
    assert report.bytes_after["attention"] == 2 * n_attention(tmp_path / "out")


def test_tokenizers_come_along_and_other_weights_do_not(tmp_path: Path) -> None:
    source = builtin_copy(tmp_path / "in")
    (source / "vocab.txt").write_text("a\nb\n")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    for name in ("pytorch_model.bin", "tf_model.h5", "model.onnx"):
        (source / name).write_bytes(b"weights")
    report = compress(source, tmp_path / "out", keep=0.5)
    assert (tmp_path / "out" / "vocab.txt").read_text() == "a\nb\n"
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "{}"
    assert sorted(report.left_out) == ["model.onnx", "pytorch_model.bin", "tf_model.h5"]
    assert not any((tmp_path / "out" / name).exists() for name in report.left_out)


@pytest.mark.slow
def test_zero_weights_are_compressed_too(tmp_path: Path) -> None:
    source = builtin_copy(tmp_path / "in")
    change_tensors(source, lambda t: [t[n].fill(0) for n in t if "layers.0.attention" in n])
    for method in METHODS:
        report = compress(source, tmp_path / method, keep=0.5, method=method)
        assert report.layers[0].qk_error == report.layers[0].ov_error == 0
        assert np.isfinite(hidden(tmp_path / method)).all()


def test_the_same_twice(tmp_path: Path, compressed: Compressed) -> None:
    for method in METHODS:
        compress(builtin_path(), tmp_path / method, keep=0.5, method=method)
        made = compressed("builtin", 0.5, method)
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / method / name).read_bytes() == (made / name).read_bytes()


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    compress(
        builtin_path(),
        tmp_path / "out",
        keep=0.5,
        progress=lambda s, n, total: seen.setdefault(s, []).append((n, total)),
    )
    assert len(seen) >= 3
    for stage, steps in seen.items():
        assert steps == sorted(steps), stage
        assert steps[-1][0] == steps[-1][1] > 0, stage
        assert len({total for _, total in steps}) == 1, stage


# ------------------------------------------------------------------------------------------------- what is refused

Break = Callable[[Path], Any]
REFUSED: dict[str, tuple[dict[str, Any], Break, type[Exception], list[str]]] = {
    "keep 0": ({"keep": 0}, lambda f: None, ArgumentError, ["keep", "(0, 1]"]),
    "keep -1": ({"keep": -1}, lambda f: None, ArgumentError, ["keep", "-1"]),
    "keep over 1": ({"keep": 1 + 1e-9}, lambda f: None, ArgumentError, ["keep"]),
    "keep nan": ({"keep": math.nan}, lambda f: None, ArgumentError, ["keep", "nan"]),
    "keep inf": ({"keep": math.inf}, lambda f: None, ArgumentError, ["keep", "inf"]),
    "keep text": ({"keep": "half"}, lambda f: None, ArgumentError, ["keep", "half"]),
    "keep True": ({"keep": True}, lambda f: None, ArgumentError, ["keep", "True"]),
    "keep too small": ({"keep": 1e-4}, lambda f: None, ArgumentError, ["keep must be at least"]),
    "method": ({"method": "svd"}, lambda f: None, ArgumentError, ["method", "svd", *METHODS]),
    "layout": ({"layout": "sparse"}, lambda f: None, ArgumentError, ["layout", "sparse", *LAYOUTS]),
    "NaN in attention": (
        {},
        lambda f: change_tensors(f, lambda t: t["layers.1.attention.key.weight"].__setitem__((0, 3), np.nan)),
        FileFormatError,
        ["layers.1.attention.key.weight", "nan"],
    ),
    "inf in a bias": (
        {},
        lambda f: change_tensors(f, lambda t: t["layers.0.attention.value.bias"].__setitem__(2, np.inf)),
        FileFormatError,
        ["layers.0.attention.value.bias", "inf"],
    ),
    "NaN in a copied tensor": (
        {},
        lambda f: change_tensors(f, lambda t: t["unembed.weight"].__setitem__((0, 0), np.nan)),
        FileFormatError,
        ["unembed.weight", "nan"],
    ),
    "unknown architecture": (
        {},
        lambda f: change_config(f, model_type="mamba"),
        FileFormatError,
        ["mamba", "bert", "gpt2"],
    ),
    "no config": ({}, lambda f: (f / "config.json").unlink(), FileNotFoundError, ["config.json"]),
    "cut short": (
        {},
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        FileFormatError,
        ["model.safetensors"],
    ),
    "integer weights": (
        {},
        lambda f: change_tensors(
            f,
            lambda t: t.update({n: t[n].astype(np.int8) for n in t if "query.weight" in n}),
        ),
        FileFormatError,
        ["query.weight"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    changes, damage, kind, words = REFUSED[case]
    source, place = builtin_copy(tmp_path / "in"), tmp_path / "place"
    damage(source)
    place.mkdir()
    untouched = digest(source)
    if kind is FileNotFoundError:
        with pytest.raises(FileNotFoundError, match=words[0]):
            compress(source, place / "out", **({"keep": 0.5} | changes))
    else:
        with refused(kind, *words):
            compress(source, place / "out", **({"keep": 0.5} | changes))
    assert list(place.iterdir()) == []
    assert digest(source) == untouched


def test_numbers_that_half_precision_cannot_hold_are_refused(tmp_path: Path) -> None:
    """Weights of 6e4 fit into F16; the singular vectors times the singular values need not."""
    source, place = builtin_copy(tmp_path / "in"), tmp_path / "place"
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if "layers.0.attention" in name and name.endswith("weight"):
            tensors[name] = np.full_like(tensors[name], 6e4)
    save_file({name: a.astype(np.float16) for name, a in tensors.items()}, source / "model.safetensors")
    place.mkdir()
    with refused(ArgumentError, "layers.0.attention", "F16"):
        compress(source, place / "out", keep=0.5, method="tucker")
    assert list(place.iterdir()) == []


def test_what_is_compressed_already_is_refused(compressed: Compressed, tmp_path: Path) -> None:
    source = compressed("builtin")
    untouched = digest(source)
    with refused(ArgumentError, "compressed already"):
        compress(source, tmp_path / "out", keep=0.5)
    assert list(tmp_path.iterdir()) == []
    assert digest(source) == untouched
    # the dense layout holds ordinary weights
    assert compress(compressed("builtin", layout="dense"), tmp_path / "out", keep=0.5).kept <= 0.5


@pytest.mark.slow
def test_the_least_that_a_refusal_names_suffices(tmp_path: Path) -> None:
    for method in METHODS:
        with pytest.raises(ArgumentError, match="keep must be at least") as caught:
            compress(builtin_path(), tmp_path / "no", keep=1e-3, method=method)
        least = float(re.search(r"at least (\d\.\d+)", str(caught.value))[1])  # type: ignore[index]
        assert compress(builtin_path(), tmp_path / method, keep=least, method=method).kept <= least


def test_the_page_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real page: pictures inside it, every head of every layer, nothing fetched from elsewhere."""
    from tnlib_adapters.compression.report.html import write_page

    monkeypatch.setattr(WRITE_PAGE, write_page)
    source = builtin_copy(tmp_path / "a <b> & c")
    compress(source, tmp_path / "out", keep=0.5)
    page = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "<svg" in page or "data:image/" in page
    assert not any(word in page for word in ("<script src", 'src="http', 'href="http'))
    assert "<b>" not in page or "a <b>" not in page
    shutil.rmtree(source)
    assert open_checkpoint(tmp_path / "out").n_layers == 2
