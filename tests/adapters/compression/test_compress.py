"""A folder in, a smaller folder out: what --keep promises, counted in the written bytes, and what the model becomes."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import builtin_copy, change_tensors
from compressed_folders import by_options, digest, leave_out_pictures, relative
from oracles import refused
from slow_cases import mostly_slow
from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import loss, run

from tnlib import ArgumentError

MODELS = mostly_slow(["builtin", "bert", "gpt2_lm"], ["gpt2_lm"])
METHODS = ["heads", "matrix", "ttm", "tucker", "cp"]
LAYOUTS = ["factored", "dense"]
REPORT, PAGE = "tnlib_report.json", "tnlib_report.html"

Compressed = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def without_pictures() -> Iterator[None]:
    """Drawing takes most of the time of a small compression; one test below has the real page."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
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
                report = compress(sources(model), out, **by_options(keep=keep, method=method, layout=layout))
            except ArgumentError as problem:  # small models have few sizes to choose from; the message names one
                named = re.search(r"the nearest below it is (\d\.\d+)", str(problem))
                if named is None:
                    raise
                report = compress(sources(model), out, **by_options(keep=float(named[1]), method=method, layout=layout))
            assert digest(sources(model)) == untouched
            assert json.loads((out / REPORT).read_text()) == json.loads(report.to_json())
            made[key] = out
        return made[key]

    return get


def written_report(out: Path) -> dict[str, Any]:
    return json.loads((out / REPORT).read_text())


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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_smaller_fraction_errs_more(model: str, method: str, compressed: Compressed) -> None:
    def worst(keep: float) -> float:
        layers = written_report(compressed(model, keep, method))["layers"]
        return math.sqrt(sum(layer["qk_error"] ** 2 + layer["ov_error"] ** 2 for layer in layers))

    assert worst(1.0) < 1e-5 < worst(0.7) < worst(0.5)


# ------------------------------------------------------------------------------------------------ the built-in model


@pytest.fixture(scope="module")
def measured() -> Callable[[Path], float]:
    tokens, repeated = repeated_segments(60, rng=np.random.default_rng(77))
    return functools.cache(lambda folder: loss(open_checkpoint(folder), tokens, repeated))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_loss_of_the_built_in_model(method: str, compressed: Compressed, measured: Callable[[Path], float]) -> None:
    before = measured(builtin_path())
    assert before < 0.5
    halves = [measured(compressed("builtin", 0.5, method, layout)) for layout in LAYOUTS]
    assert halves[0] == pytest.approx(halves[1], rel=1e-5)
    assert halves[0] > before + 0.01
    for layout in LAYOUTS:
        assert measured(compressed("builtin", 1.0, method, layout)) == pytest.approx(before, rel=1e-5)


# ----------------------------------------------------------------------------------------------- sources of all kinds


@pytest.mark.slow
def test_zero_weights_are_compressed_too(tmp_path: Path) -> None:
    source = builtin_copy(tmp_path / "in")
    change_tensors(source, lambda t: [t[n].fill(0) for n in t if "layers.0.attention" in n])
    for method in METHODS:
        report = compress(source, tmp_path / method, Budget(keep=0.5), method=method, what="attention")
        assert report.layers[0].qk_error == report.layers[0].ov_error == 0
        assert np.isfinite(hidden(tmp_path / method)).all()


def test_the_same_twice(tmp_path: Path, compressed: Compressed) -> None:
    for method in ("heads", "ttm"):
        compress(builtin_path(), tmp_path / method, Budget(keep=0.5), method=method, what="attention")
        made = compressed("builtin", 0.5, method)
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / method / name).read_bytes() == (made / name).read_bytes()


# ------------------------------------------------------------------------------------------------- what is refused


def test_what_is_compressed_already_is_refused(compressed: Compressed, tmp_path: Path) -> None:
    source = compressed("builtin")
    untouched = digest(source)
    with refused(ArgumentError, "compressed already"):
        compress(source, tmp_path / "out", Budget(keep=0.5), what="attention")
    assert list(tmp_path.iterdir()) == []
    assert digest(source) == untouched
    # the dense layout holds ordinary weights
    assert (
        compress(compressed("builtin", layout="dense"), tmp_path / "out", Budget(keep=0.5), what="attention").kept
        <= 0.5
    )
