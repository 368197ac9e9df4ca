"""What is asked of a compression: kept as it was asked, or refused before a file is opened."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from oracles import refused
from random_checkpoints import random_folder
from tnlib_adapters import builtin_path, compress, open_checkpoint
from tnlib_adapters.compression.methods.table import METHODS
from tnlib_adapters.compression.methods.table import WITH_TEXT as BY_TEXT
from tnlib_adapters.compression.request import STORES, WHAT, Request

from tnlib import ArgumentError

TEXT, SEEN = Path("text.txt"), Path("seen")


def test_it_holds_the_arguments_of_compress() -> None:
    taken = inspect.signature(compress).parameters
    for field in dataclasses.fields(Request):
        assert field.default == taken[field.name].default
    assert taken.keys() - {field.name for field in dataclasses.fields(Request)} == {
        "source",
        "out",
        "cache_bytes",
        "sizes",
        "force",
        "progress",
    }


def test_numbers_become_floats() -> None:
    asked = Request(keep=1, max_error=0)
    assert (type(asked.keep), type(asked.max_error)) == (float, float)
    assert (asked.keep, asked.max_error) == (1.0, 0.0)


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "neither": ({}, ("keep or max_error must be given",)),
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
    "no text": ({"keep": 0.5, "method": "cp", "calibrate": TEXT}, ("calibrate works with", *BY_TEXT, "'cp'")),
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
    "statistics": ({"keep": 0.5, "statistics": SEEN}, ("statistics must come with the text",)),
    **{
        f"{method} with a text": (
            {"max_error": 0.1, "method": method, "calibrate": TEXT},
            (f"max_error cannot be met by method '{method}' with a text", "not known"),
        )
        for method in ("matrix", "heads")
    },
    "calibration_tokens": ({"keep": 0.5, "calibrate": TEXT, "calibration_tokens": 1}, ("at least 2, got 1",)),
    "calibration_tokens alone": ({"keep": 0.5, "calibration_tokens": 64}, ("must come with the text",)),
    "statistics of a plain method": (
        {"keep": 0.5, "calibrate": TEXT, "statistics": SEEN, "method": "matrix"},
        ("statistics", "'matrix'", "leave statistics out"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_goes_against_the_rest_is_refused(case: str, tmp_path: Path) -> None:
    asked, words = BAD[case]
    with refused(ArgumentError, "compress: ", *words):
        Request(**asked)
    with refused(ArgumentError, "compress: ", *words):  # before the missing folder is looked for
        compress(tmp_path / "nowhere", tmp_path / "out", **asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_but_one_foretells(method: str) -> None:
    if method != "cp":
        assert Request(max_error=0.1, method=method).max_error == 0.1
    assert Request(keep=0.5, method=method).method == method


def test_models_that_cannot_do_it(tmp_path: Path) -> None:
    with refused(ArgumentError, "what must be 'attention' for a tnlib_attention_only", "'all'"):
        Request(keep=0.5, what="all").check(open_checkpoint(builtin_path()))
    prime = open_checkpoint(random_folder(tmp_path / "prime", d=13, n_heads=1))
    with refused(ArgumentError, "method 'ttm' cannot run", "13 is prime"):
        Request(keep=0.5, method="ttm").check(prime)
    Request(keep=0.5).check(prime)


@pytest.mark.parametrize("method", BY_TEXT)
def test_a_text_needs_a_tokenizer(method: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words\n" * 100)
    with refused(ArgumentError, "compress: a text needs a tokenizer", str(builtin_path()), "do without"):
        size = {"bits": 4} if BY_TEXT[method].in_bits else {"keep": 0.5}
        compress(builtin_path(), tmp_path / "out", method=method, calibrate=tmp_path / "text.txt", **size)
    assert not (tmp_path / "out").exists()
