"""Compression by several processes: the same result as in one, with one worker killed in the middle as well."""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
distributed = pytest.importorskip("distributed")

from tnlib_adapters import builtin_path, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.factors.expansion import expand  # noqa: E402

LLAMA = builtin_path("llama")
OPTIONS = {"what": "all", "keep": 0.5}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two worker processes, started again when they die."""
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        memory_limit=0,
        dashboard_address=None,
        local_directory=str(tmp_path_factory.mktemp("workers")),
        silence_logs=logging.CRITICAL,
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text in the language of the built-in Llama."""
    file = tmp_path_factory.mktemp("text") / "code.txt"
    file.write_text(Path(tarfile.__file__).read_text(encoding="utf-8")[3000:23_000], encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch, without_pictures: None) -> None:
    for module in ("calibrate", "quantize"):
        monkeypatch.setattr(f"tnlib_adapters.compression.calibration.{module}._STEPS", 2)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the stored tensors of a checkpoint."""
    return {name: info.read() for name, info in open_checkpoint(folder).folder.tensors.items()}


def assert_same_bits(folder: Path, other: Path) -> None:
    expected, values = weights(folder), weights(other)
    assert values.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array)


def products(folder: Path) -> dict[str, np.ndarray]:
    """Return the dense weights of a factored checkpoint by module and projection."""
    checkpoint = open_checkpoint(folder)
    dense = {}
    for module in {entry.module for entry in checkpoint.factored or ()}:
        expanded = expand(checkpoint.factored_matrices(module), checkpoint.sizes)
        dense |= {f"{module} {name}": array for name, array in expanded.weights.items()}
    return dense


@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker", "cp"])
def test_plain_methods_have_the_bits_of_one_process(method: str, workers: Any, tmp_path: Path) -> None:
    options = {"method": method, "keep": 0.5}
    compress(LLAMA, tmp_path / "one", **options)
    compress(LLAMA, tmp_path / "two", cluster=workers.scheduler_address, **options)
    assert_same_bits(tmp_path / "one", tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
