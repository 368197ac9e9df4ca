"""Trained models in int8: what rounding costs on text."""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import tnlib_adapters.transformers_plugin  # noqa: F401 - registers the layout
from compressed_folders import by_options
from tnlib_adapters import builtin_path, compress, evaluate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_pictures")]
LLAMA = builtin_path("llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text to calibrate on and one to measure on, of two modules."""
    folder = tmp_path_factory.mktemp("texts")
    for name, module, count in (("seen", tarfile, 30_000), ("other", argparse, 8_000)):
        (folder / name).write_text(Path(str(module.__file__)).read_text(encoding="utf-8")[:count], encoding="utf-8")
    return folder / "seen", folder / "other"


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Lines of documentation, every other one to calibrate on."""
    lines = [" ".join(text.split()) for text in (argparse.__doc__ or "").split("\n\n")]
    for module in (argparse, tarfile):
        for one in vars(module).values():
            lines += [line.strip() for line in (getattr(one, "__doc__", None) or "").splitlines()]
    kept = list(dict.fromkeys(line for line in lines if len(line) > 40))
    folder = tmp_path_factory.mktemp("sentences")
    for k, name in enumerate(("seen", "other")):
        (folder / name).write_text("\n".join(kept[k::2][:90]), encoding="utf-8")
    return folder / "seen", folder / "other"


def error(source: Path, out: Path, text: Path, **arguments: Any) -> float:
    compress(source, out, **by_options(force=True, **arguments))
    return evaluate(source, out, text).error


def test_llama_in_int8_hardly_changes_and_factors_lose_nothing_more(texts: Any, tmp_path: Path) -> None:
    out, other = tmp_path / "out", texts[1]
    plain = error(LLAMA, out, other, keep=1, method="matrix", store="int8")
    wide, narrow = (error(LLAMA, out, other, keep=0.75, method="matrix", store=store) for store in ("float", "int8"))
    assert 0 < plain < 1e-3
    assert wide > 20 * plain
    assert narrow == pytest.approx(wide, rel=0.05)


def test_minilm_in_int8_hardly_changes(minilm_path: Path, sentences: Any, tmp_path: Path) -> None:
    assert error(minilm_path, tmp_path / "out", sentences[1], keep=1, method="matrix", store="int8") < 1e-3
