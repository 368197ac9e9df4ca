"""Sources and factors beyond the memory of a compression: bounded reads, the same results, no file left behind."""

from __future__ import annotations

import os
import signal
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from checkpoint_folders import change_tensors, random_folder
from oracles import refused
from slow_cases import mostly_slow

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from compressed_folders import by_options, limit_cache  # noqa: E402
from tnlib_adapters import Budget, Run, builtin_path, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.compress import factorise, round_plan  # noqa: E402
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredArrays, Workspace  # noqa: E402
from tnlib_adapters.compression.source_model import SourceModel  # noqa: E402
from tnlib_adapters.compression.write import write_checkpoint  # noqa: E402
from transformers_models import random_model, save_with_tokenizer  # noqa: E402

from tnlib import ArgumentError, FileFormatError  # noqa: E402

METHODS = ("matrix", "heads", "ttm", "tucker", "cp")


def in_files(folder: Path) -> Workspace:
    return Workspace(0, lambda: folder)


@pytest.fixture
def terminated_by_signals() -> Iterator[None]:
    """SIGTERM raises SystemExit, as in the commands."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", mostly_slow([None, 4, 8], [4]))
def test_factors_do_not_depend_on_where_they_are(tmp_path: Path, method: str, bits: int | None) -> None:
    checkpoint = open_checkpoint(builtin_path())
    plans = []
    in_memory = Workspace(folder=lambda: pytest.fail("a small model needs no files"))
    for workspace in (in_memory, Workspace(0), in_files(tmp_path)):  # the second makes parts again
        plan = factorise(checkpoint, method, workspace=workspace).plan(0.5)
        plans.append(plan if bits is None else round_plan(plan, checkpoint.wiring, bits))
    assert list(tmp_path.iterdir())
    kept, *others = plans
    for plan in others:
        assert (plan.numbers, plan.forecast, plan.descriptions) == (kept.numbers, kept.forecast, kept.descriptions)
        for module, own in kept.matrices.items():
            for a, b in zip(own, plan.matrices[module], strict=True):
                assert a.describe() == b.describe()
                for part, values in a.arrays.items():
                    assert values.dtype == b.arrays[part].dtype
                    np.testing.assert_array_equal(values, b.arrays[part], strict=True)
                assert all(np.array_equal(held.codes, b.integers[part].codes) for part, held in a.integers.items())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("llama", {"keep": 0.5, "method": "matrix", "what": "all"}, marks=pytest.mark.slow),
        pytest.param("induction", {"keep": 0.5, "layout": "dense"}, marks=pytest.mark.slow),
        ("induction", {"method": "matrix", "store": "int4"}),
    ],
    ids=["factored", "dense", "int4"],
)
def test_the_folder_does_not_depend_on_the_memory(
    tmp_path: Path, model: str, options: dict[str, Any], without_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for name, n_bytes in (("in memory", 2**29), ("in files", 0)):
        limit_cache(monkeypatch, n_bytes)
        reports.append(asdict(compress(builtin_path(model), tmp_path / name, **by_options(**options))))
    for report in reports:
        del report["seconds"], report["peak_memory"]
    assert reports[0] == reports[1]
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("in memory", "in files"))
    assert first == second
    assert {path.name for path in tmp_path.iterdir()} == {"in memory", "in files"}


@pytest.mark.parametrize("size", [{"keep": 0.5}, {"bits": 3}], ids=str)
def test_what_is_between_blocks_is_in_memory_or_in_files(
    folders: Any, text: Path, tmp_path: Path, size: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files: dict[str, set[str]] = {"in memory": set(), "in files": set()}
    for name, n_bytes in (("in memory", 2**29), ("in files", 0)):
        limit_cache(monkeypatch, n_bytes)

        def look(_stage: str, _done: int, _total: int, seen: set[str] = files[name]) -> None:
            seen |= {file.name for folder in tmp_path.glob("tnlib-*") for file in folder.iterdir()}
            seen |= {file.name for folder in tmp_path.glob(".*.scratch") for file in folder.iterdir()}

        options = by_options(calibrate=text, what="all", progress=look, **size)
        compress(folders["llama"], tmp_path / name, **options)
    assert files["in memory"] == set()
    assert {"stream-1", "gradient-1"} <= files["in files"]
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in files)
    assert first == second


@dataclass
class Part:
    arrays: list[np.ndarray]
    curves: tuple[()] = ()
    fixed: int = 0


def test_all_arrays_of_a_part_are_in_its_file_and_keep_their_order(tmp_path: Path) -> None:
    a = np.random.default_rng(0).standard_normal((60, 80))
    part = Part([a, a.T, a[:, ::2], a[:0], a.astype(np.float32)])
    lazy = LazyPart(cast(Any, part), in_files(tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size > sum(own.nbytes for own in part.arrays)
    for own, read in zip(part.arrays, lazy.load().arrays, strict=True):
        np.testing.assert_array_equal(own, read, strict=True)
        assert read.flags.f_contiguous == (own.flags.f_contiguous or own.size == 0)
        assert read.base is not own.base


def peak_of(folder: Path, workspace: Workspace) -> int:
    """Return the traced peak of a compression but its measurements and its page, in bytes."""
    checkpoint, out = open_checkpoint(folder), folder / "out"
    out.mkdir()
    tracemalloc.start()
    plan = factorise(checkpoint, "matrix", workspace=workspace).plan(0.5)
    for _ in write_checkpoint(checkpoint, plan, "factored", out):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.slow
def test_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    def peaks(name: str, workspace: Callable[[Path], Workspace]) -> list[int]:
        found = []
        for n_layers in (2, 8):
            folder, scratch = tmp_path / f"{name}{n_layers}", tmp_path / f"files of {name}{n_layers}"
            random_folder(folder, d=240, n_layers=n_layers)
            scratch.mkdir()
            found.append(peak_of(folder, workspace(scratch)))
        return found

    few, many = peaks("bounded", in_files)
    assert many < 1.25 * few  # names and curves of six more layers
    few, many = peaks("in memory", lambda _: Workspace())
    assert many > 2 * few


def test_files_are_removed_with_their_factors(tmp_path: Path) -> None:
    factorisation = factorise(open_checkpoint(builtin_path()), "matrix", workspace=in_files(tmp_path))
    n_parts = len(list(tmp_path.iterdir()))
    plan = factorisation.plan(0.5)
    assert n_parts == len(factorisation.parts)
    del factorisation
    assert len(list(tmp_path.iterdir())) == len(plan.matrices)
    del plan
    assert not list(tmp_path.iterdir())


def test_the_last_plan_frees_each_part_once_its_factors_are_stored() -> None:
    factorisation = factorise(open_checkpoint(builtin_path("llama")), "matrix", what="all")
    captured = [cell.cell_contents for part in factorisation.parts.values() for cell in part.load.__closure__]
    held = [weakref.ref(value) for value in captured if isinstance(value, StoredArrays)]
    assert len(held) == len(factorisation.parts)
    del captured
    choice = factorisation.select(Budget(keep=0.5))
    kept, n_freed = factorisation.plan_of(choice), list[int]()
    assert all(part() for part in held)

    def progress(stage: str, done: int, total: int) -> None:
        n_freed.append(sum(part() is None for part in held))

    plan = factorisation.plan_of(choice, progress, is_last=True)
    assert n_freed == [*range(len(held) + 1)]
    assert (plan.numbers, plan.forecast, plan.descriptions) == (kept.numbers, kept.forecast, kept.descriptions)
    for module, own in kept.matrices.items():
        for a, b in zip(own, plan.matrices[module], strict=True):
            np.testing.assert_equal(dict(a.arrays), dict(b.arrays))


@pytest.mark.parametrize("stage", ["factorising", "choosing factors", "writing tensors", "measuring errors"])
@pytest.mark.usefixtures("terminated_by_signals")
def test_a_signal_leaves_no_files(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_cache(monkeypatch, 0)
    beside = set[str]()

    def progress(now: str, done: int, total: int) -> None:
        if now == stage and done == 1:
            beside.update(path.suffix for path in tmp_path.iterdir())
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        compress(builtin_path(), tmp_path / "out", Budget(keep=0.5), what="attention", run=Run(progress=progress))
    assert ".scratch" in beside
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_cache(monkeypatch, 0)
    with pytest.raises(ArgumentError, match="not even the smallest factors fit"):
        compress(builtin_path(), tmp_path / "out", Budget(keep=0.001), method="matrix", what="attention")
    assert not list(tmp_path.iterdir())


def test_a_copy_leaves_the_original(folders: Any) -> None:
    source = SourceModel(open_checkpoint(folders["bert"]))
    before = [parameter.clone() for parameter in source.original.model.parameters()]
    with torch.no_grad():
        for parameter in source.original.changed(None).model.parameters():
            parameter.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, source.original.model.parameters(), strict=True))


def test_nan_is_refused_before_the_text_is_run(text: Path, tmp_path: Path) -> None:
    folder = save_with_tokenizer(random_model("bert"), tmp_path / "in")
    name = next(n for n in open_checkpoint(folder).folder.tensors if n.endswith("key.weight"))
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name] * np.nan}))
    stages: list[str] = []
    with refused(FileFormatError, name, "nan"):
        compress(
            folder,
            tmp_path / "out",
            **by_options(keep=0.5, calibrate=text, progress=lambda stage, _done, _total: stages.append(stage)),
        )
    assert set(stages) == {"checking weights", "loading the model"}
    assert not (tmp_path / "out").exists()
