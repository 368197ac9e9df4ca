"""The source of a compression: its tensors are read once to run it, and at most twice besides."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import change_tensors
from oracles import refused
from running_models import save_with_tokenizer
from tnlib_adapters import builtin_path, compress, open_checkpoint
from tnlib_adapters.files.tensor_file import TensorInfo
from transformers_models import random_model

from tnlib import FileFormatError

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from tnlib_adapters.compression.source_model import SourceModel  # noqa: E402


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Path, str]]:
    """Count of the reads of tensors, by folder and name."""
    counts: Counter[tuple[Path, str]] = Counter()

    def counting(read: Any) -> Any:
        def counted(info: TensorInfo, *args: Any) -> Any:
            counts[info.file.parent, info.name] += 1
            return read(info, *args)

        return counted

    for name in ("read_stored", "read_part"):
        monkeypatch.setattr(TensorInfo, name, counting(getattr(TensorInfo, name)))
    return counts


def assert_two_reads(source: Path, reads: Counter[tuple[Path, str]]) -> None:
    counts = {name: count for (folder, name), count in reads.items() if folder == source}
    assert counts.keys() == open_checkpoint(source).folder.tensors.keys()
    assert max(counts.values()) <= 3  # once for the running model


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("name", "method", "what"),
    [
        *((name, "matrix", what) for name in ("bert", "qwen3") for what in ("attention", "mlp", "all")),
        *(
            pytest.param(name, "calibrated", what, marks=pytest.mark.slow)
            for name, what in (("bert", "mlp"), ("bert", "all"), ("qwen3", "all"))
        ),
    ],
)
def test_two_reads(name: str, method: str, what: str, folders: Any, text: Path, tmp_path: Path, reads: Any) -> None:
    """Biases that are copied, and norms of heads."""
    compress(folders[name], tmp_path / "out", keep=0.5, what=what, method=method, calibrate=text)
    assert_two_reads(folders[name], reads)


@pytest.mark.usefixtures("without_pictures")
def test_the_builtin_llama(text: Path, tmp_path: Path, reads: Any) -> None:
    source = builtin_path("llama")
    compress(source, tmp_path / "out", keep=0.5, what="all", method="matrix", calibrate=text)
    assert_two_reads(source, reads)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("what", ["attention", "mlp", "all"])
def test_two_reads_without_a_text(what: str, folders: Any, tmp_path: Path, reads: Any) -> None:
    compress(folders["bert"], tmp_path / "out", keep=0.5, what=what, method="matrix")
    assert max(count for (folder, _), count in reads.items() if folder == folders["bert"]) <= 2


def test_a_copy_leaves_the_original(folders: Any) -> None:
    source = SourceModel(open_checkpoint(folders["bert"]))
    before = [parameter.clone() for parameter in source.original.model.parameters()]
    with torch.no_grad():
        for parameter in source.copy().model.parameters():
            parameter.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, source.original.model.parameters(), strict=True))


@pytest.mark.parametrize("method", ["matrix", "calibrated"])
def test_nan_is_refused_before_the_text_is_run(method: str, text: Path, tmp_path: Path) -> None:
    folder = save_with_tokenizer(random_model("bert"), tmp_path / "in")
    name = next(n for n in open_checkpoint(folder).folder.tensors if n.endswith("key.weight"))
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name] * np.nan}))
    stages: list[str] = []
    with refused(FileFormatError, name, "nan"):
        compress(
            folder,
            tmp_path / "out",
            keep=0.5,
            method=method,
            calibrate=text,
            progress=lambda stage, _done, _total: stages.append(stage),
        )
    assert set(stages) == {"checking weights"}
    assert not (tmp_path / "out").exists()
