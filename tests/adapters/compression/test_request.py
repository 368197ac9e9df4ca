"""Options of a compression, kept as stated or refused before a file is opened; budgets of errors and products."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import itertools
import math

import numpy as np
import pytest
from checkpoint_folders import random_folder
from command_line import run_command
from compressed_folders import by_options, n_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import refused
from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint
from tnlib_adapters.compression.calibration import factorise_and_fit
from tnlib_adapters.compression.calibration.calibrate import ComponentOptions
from tnlib_adapters.compression.methods.components import components
from tnlib_adapters.compression.methods.factorisation import Factorisation, ModuleWeights
from tnlib_adapters.compression.methods.method_table import METHODS
from tnlib_adapters.compression.methods.method_table import WITH_TEXT as BY_TEXT
from tnlib_adapters.compression.methods.out_of_core import LazyPart, Workspace
from tnlib_adapters.compression.options import STORES
from tnlib_adapters.compression.request import WHAT, Request

from tnlib import ArgumentError

TEXT, SEEN = Path("text.txt"), Path("seen")


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "neither": ({}, ("a text or a size must be given, got neither", "--calibrate TEXT", "--keep 0.5")),
    "neither of a method": ({"method": "cp"}, ("a text or a size must be given, got neither",)),
    "no size of factors": (
        {"method": "calibrated", "calibrate": TEXT},
        ("keep or max_error must be given with method 'calibrated', got neither",),
    ),
    "keep": ({"keep": 2}, ("keep must lie in (0, 1]", "got 2")),
    "keep beside an error": ({"keep": 0, "max_error": 0.1}, ("keep must lie in (0, 1]",)),
    "max_error": ({"max_error": math.nan}, ("max_error must be a number from 0 on", "nan")),
    "layout": ({"keep": 0.5, "layout": "sparse"}, ("layout must be one of factored, dense", "'sparse'")),
    "other form": (
        {"keep": 0.5, "layout": "onnx"},
        ("got 'onnx'; run `tnlib compress", "tnlib export-onnx SMALL OUT"),
    ),
    "store": ({"keep": 0.5, "store": "int7"}, ("store must be one of", ", ".join(STORES), "'int7'")),
    "what": ({"keep": 0.5, "what": "heads"}, ("what must be one of", *WHAT, "'heads'")),
    "method": ({"keep": 0.5, "method": "fourier"}, ("method must be one of", *METHODS, "'fourier'")),
    "needs a text": ({"keep": 0.5, "method": "calibrated"}, ("needs a text", "'calibrated'", "calibrate")),
    "no text": ({"keep": 0.5, "method": "cp", "calibrate": TEXT}, ("calibration works with", *BY_TEXT, "'cp'")),
    "cp": ({"max_error": 0.1, "method": "cp"}, ("max_error cannot be met by method 'cp'", "not known")),
    "flops": ({"flops": 2, "calibrate": TEXT}, ("flops must lie in (0, 1]", "got 2")),
    "flops without a text": ({"flops": 0.5}, ("flops works with method 'calibrated'", "got 'heads'", "--calibrate")),
    "flops beside bits": ({"flops": 0.5, "bits": 3, "calibrate": TEXT}, ("flops works with", "got 'quantized'")),
    "flops beside an error": (
        {"flops": 0.5, "max_error": 0.1, "calibrate": TEXT},
        ("flops must come with keep or alone", "max_error=0.1"),
    ),
    "flops of products": (
        {"flops": 0.5, "layout": "dense", "calibrate": TEXT},
        ("flops must come with", "layout 'dense'"),
    ),
    "folder": ({"keep": 0.5, "folder": SEEN}, ("folder must come with calibration",)),
    **{
        f"{method} with a text": (
            {"keep": 0.5, "method": method, "calibrate": TEXT},
            ("calibration works with method 'calibrated', 'quantized'", f"got '{method}'"),
        )
        for method in ("matrix", "heads")
    },
    **{
        name: ({"keep": 0.5, "calibrate": TEXT, name: 1}, (f"{attribute} must be at least 2, got 1",))
        for name, attribute in (("calibration_tokens", "tokens"), ("window", "window"))
    },
    "window alone": ({"keep": 0.5, "window": 64}, ("--window must come with",)),
    "calibration_tokens alone": ({"keep": 0.5, "calibration_tokens": 64}, ("--calibration-tokens must come with",)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_goes_against_the_rest_is_refused(case: str, tmp_path: Path) -> None:
    asked, words = BAD[case]
    with refused(ArgumentError, *words):
        Request.of(**by_options(**asked))
    with refused(ArgumentError, *words):  # before the missing folder is looked for
        compress(tmp_path / "nowhere", tmp_path / "out", **by_options(**asked))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_but_one_foretells(method: str) -> None:
    if method != "cp":
        assert Request.of(Budget(max_error=0.1), method=method).budget.max_error == 0.1
    assert Request.of(Budget(keep=0.5), method=method).method == method


@pytest.mark.parametrize(
    ("size", "method"),
    [
        ({}, "quantized"),
        ({"bits": 3}, "quantized"),
        ({"max_error": 0.1}, "quantized"),
        ({"max_error": 0.1, "bits": 3}, "quantized"),
        ({"bits": 3, "keep": 0.5}, "quantized"),
        ({"store": "int4"}, "quantized"),
        ({"keep": 0.5}, "calibrated"),
        ({"flops": 0.5}, "calibrated"),
        ({"max_error": 0.1, "keep": 0.5}, "calibrated"),
        ({"max_error": 0.1, "store": "int4"}, "calibrated"),
    ],
)
def test_method_of_a_size_with_a_text(size: dict[str, Any], method: str) -> None:
    assert Request.of(Budget(**size), calibration=TEXT).method == method


def test_models_that_cannot_do_it(tmp_path: Path) -> None:
    with refused(ArgumentError, "what must be 'attention' for a tnlib_attention_only", "'mlp'"):
        Request.of(Budget(keep=0.5), what="mlp").check(open_checkpoint(builtin_path()))
    Request.of(Budget(keep=0.5)).check(open_checkpoint(builtin_path()))
    prime = open_checkpoint(random_folder(tmp_path / "prime", d=13, n_heads=1))
    with refused(ArgumentError, "method 'ttm' cannot run", "13 is prime"):
        Request.of(Budget(keep=0.5), what="attention", method="ttm").check(prime)
    Request.of(Budget(keep=0.5)).check(prime)


@pytest.mark.parametrize("method", BY_TEXT)
def test_a_text_needs_a_tokenizer(method: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words\n" * 100)
    with refused(ArgumentError, "compress: a text needs a tokenizer", str(builtin_path()), "do without"):
        size = {"bits": 4} if BY_TEXT[method].in_bits else {"keep": 0.5}
        compress(builtin_path(), tmp_path / "out", **by_options(method=method, calibrate=tmp_path / "text.txt", **size))
    assert not (tmp_path / "out").exists()


pytestmark = pytest.mark.usefixtures("without_pictures")
METHODS = ("heads", "matrix", "ttm", "tucker")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return random_folder(tmp_path / "in", d=24, n_heads=4, n_layers=2)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_predicted_is_measured(method: str, source: Path, tmp_path: Path) -> None:
    for name, folder in (("bert", source), ("builtin", builtin_path())):
        report = compress(folder, tmp_path / name, Budget(keep=0.5), method=method, what="attention")
        assert report.measure == "relative error"
        assert report.predicted is not None
        assert report.measured == pytest.approx(report.predicted, rel=1e-3)
        assert 0 < report.measured < 1


@pytest.mark.parametrize("method", METHODS)
def test_the_curve_falls_and_passes_what_was_chosen(method: str, tmp_path: Path) -> None:
    report = compress(builtin_path(), tmp_path / "out", Budget(keep=0.5), method=method, what="attention")
    kept, errors = report.curve["kept"], report.curve["predicted"]
    assert len(kept) == len(errors) > 5
    assert all(a < b for a, b in itertools.pairwise(kept))
    assert all(a >= b for a, b in itertools.pairwise(errors))
    assert kept[-1] <= 1
    assert report.predicted is not None
    above, below = (
        [e for k, e in zip(kept, errors, strict=True) if k < report.kept - 0.02],
        [e for k, e in zip(kept, errors, strict=True) if k > report.kept + 0.02],
    )
    assert min(above) > report.predicted > max(below)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("allowed", [0.6, 0.2, 0.02])
def test_the_smallest_size_within_an_error(method: str, allowed: float, tmp_path: Path) -> None:
    report = compress(builtin_path(), tmp_path / "out", Budget(max_error=allowed), method=method, what="attention")
    assert (report.keep, report.max_error) == (None, allowed)
    assert report.predicted is not None
    assert report.measured is not None
    assert report.predicted <= allowed
    assert report.measured <= allowed * (1 + 1e-3)
    assert n_attention(tmp_path / "out") == report.n_after
    smaller = [
        e for k, e in zip(report.curve["kept"], report.curve["predicted"], strict=True) if k < report.kept - 0.02
    ]
    assert all(error > allowed for error in smaller), "fewer numbers would have done"


def test_no_error_at_all_keeps_what_there_is(source: Path, tmp_path: Path) -> None:
    report = compress(source, tmp_path / "out", Budget(max_error=0), method="matrix", what="attention")
    assert report.kept == 1
    assert report.measured == 0


def test_a_budget_caps_an_error(tmp_path: Path) -> None:
    loose = compress(builtin_path(), tmp_path / "loose", Budget(max_error=0.3), what="attention")
    both = compress(builtin_path(), tmp_path / "both", Budget(max_error=0.3, keep=0.9), what="attention")
    assert both.n_after == loose.n_after
    assert both.keep == 0.9
    with refused(
        ArgumentError,
        "max_error=0.3 is reached by no allocation",
        "within 0.1 of the parameters",
        "the least is 0.",
        "keep more",
    ):
        compress(builtin_path(), tmp_path / "out", Budget(max_error=0.3, keep=0.1), what="attention")
    with refused(ArgumentError, "max_error=0.3 is reached by no allocation", "none fits at all"):
        compress(builtin_path(), tmp_path / "out", Budget(max_error=0.3, keep=0.001), method="matrix", what="attention")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", True, 1j])
def test_errors_that_are_none(value: Any, tmp_path: Path) -> None:
    with refused(ArgumentError, "Budget: max_error must be a number from 0 on", repr(value)):
        compress(builtin_path(), tmp_path / "out", Budget(max_error=value), what="attention")


def test_a_method_that_cannot_tell_says_so(tmp_path: Path) -> None:
    with refused(ArgumentError, "max_error cannot be met by method 'cp'"):
        compress(builtin_path(), tmp_path / "out", Budget(max_error=0.3), method="cp", what="attention")
    report = compress(builtin_path(), tmp_path / "out", Budget(keep=0.1), method="cp", what="attention")
    assert report.predicted is None
    assert report.measured is not None
    assert report.curve == {"kept": [], "predicted": []}


SHAPES = {"square": (12, 12), "wide": (10, 24), "table": (60, 8)}


def factorisation(seed: int) -> Factorisation:
    """Matrices of falling singular values; the last is only looked up."""
    rng, parts = np.random.default_rng(seed), {}
    for name, (m, n) in SHAPES.items():
        k = min(m, n)
        weight = rng.standard_normal((m, k)) * 0.7 ** np.arange(k) @ rng.standard_normal((k, n))
        is_table = name == "table"
        options = ComponentOptions(weight, components(weight), gauged=not is_table, looked_up=is_table)
        parts[name] = LazyPart(ModuleWeights({"": options}), Workspace())
    n_before = sum(math.prod(shape) for shape in SHAPES.values())
    return Factorisation(
        "calibrated", parts, n_before, finish=lambda chosen: (factorise_and_fit._without_gauge(chosen, {"table"}), {})
    )


def multiplications(name: str, rank: int | None) -> int:
    m, n = SHAPES[name]
    if name == "table":
        return 0 if rank is None else rank * n
    return m * n if rank is None else min(rank * (m + n), m * n)


@given(st.floats(0.1, 1.0), st.floats(0.05, 1.0), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_both_budgets_are_met(keep: float, flops: float, seed: int) -> None:
    whole = factorisation(seed)
    plan = whole.plan_of(whole.select(Budget(keep=keep, flops=flops)))
    ranks = {
        name: None if own[0].kind == "dense" else own[0].arrays["right"].shape[0] for name, own in plan.matrices.items()
    }
    before, after = plan.flops or (0, 0)
    assert after == sum(multiplications(name, rank) for name, rank in ranks.items())
    assert before == sum(multiplications(name, None) for name in ranks)
    assert after <= flops * before
    assert plan.n_after <= keep * plan.n_before


def ranks_and_shapes(folder: Path) -> list[tuple[int, int, int]]:
    """Rank, inputs and outputs of all factored linear layers, from config.json."""
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    described = [entry for layer in section["layers"] for entry in layer]
    described += [entry for name, entry in section["modules"].items() if "embeddings" not in name]
    shapes = [entry["shapes"] for entry in described if entry["kind"] == "interpolative"]
    return [(s["right"][0], s["left"][0] + s["right"][0], s["right"][1]) for s in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"keep": 0.5, "flops": 0.3}, {"flops": 0.3}], ids=str)
def test_a_model_is_within_its_budget(
    options: dict[str, Any], folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    report = compress(folders["bert"], tmp_path / "out", **by_options(what="all", calibrate=text, **options))
    assert report.flops["after"] <= 0.3 * report.flops["before"]
    assert report.n_after <= options.get("keep", 1.0) * report.n_before
    layers = ranks_and_shapes(tmp_path / "out")
    assert len(layers) == 18  # six weights in three layers: none stays dense
    table = next(matrix for matrix in report.matrices if matrix.role == "embedding")
    looked_up = 0 if table.kind == "dense" else table.n_after // (50 + 24) * 24
    assert report.flops["after"] == sum(r * (m + n) for r, m, n in layers) + looked_up


@pytest.mark.slow
def test_the_command_prints_the_multiplications(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    result = run_command("compress", folders["bert"], tmp_path / "out", "--calibrate", text, "--flops", "0.5")
    assert "multiplications per token" in result.stdout
