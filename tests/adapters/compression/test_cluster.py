"""Compression by several processes: the same result as in one, with one worker killed in the middle as well."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
distributed = pytest.importorskip("distributed")

from compressed_folders import few_steps  # noqa: E402
from oracles import refused  # noqa: E402
from tnlib_adapters import builtin_path, cli, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.cluster import shared_descent  # noqa: E402

from tnlib import ArgumentError, ArgumentTypeError, ClusterError  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")

LLAMA = builtin_path("llama")
ROUNDOFF = 1e-3  # of weights in single precision, whose components are those of summed moments


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two worker processes, started again when they die."""
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        memory_limit=0,
        dashboard_address="127.0.0.1:0",
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


@pytest.fixture
def shared_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share out the gradient descent of a small model as well, for more steps than between two stored states."""
    monkeypatch.setattr(shared_descent, "LEAST_WORK", 0)
    monkeypatch.setattr(shared_descent, "MOST_BYTES", 2 * 4 * 60_000)  # two steps of the factors of a block
    few_steps(monkeypatch, 7)


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint."""
    return {name: info.read() for name, info in open_checkpoint(folder).folder.tensors.items()}


def assert_same_bits(folder: Path, other: Path) -> None:
    expected, values = stored(folder), stored(other)
    assert values.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array)


def assert_close(folder: Path, other: Path) -> None:
    expected, values = stored(folder), stored(other)
    assert values.keys() == expected.keys()
    for name, array in expected.items():
        assert np.linalg.norm(values[name] - array) <= ROUNDOFF * np.linalg.norm(array), name


def killing(workers: Any, stage: str, at: int) -> Callable[[str, int, int], None]:
    """Return a progress callback that kills a worker at the call of this number in a stage."""
    counts = [0]

    def progress(name: str, _done: int, _total: int) -> None:
        counts[0] += name == stage
        if name == stage and counts[0] == at:
            os.kill(next(iter(workers.workers.values())).pid, signal.SIGKILL)

    return progress


@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker", "cp"])
def test_plain_methods_have_the_bits_of_one_process(method: str, workers: Any, tmp_path: Path) -> None:
    options = {"method": method, "keep": 0.5}
    compress(LLAMA, tmp_path / "one", **options)
    compress(LLAMA, tmp_path / "two", cluster=workers.scheduler_address, **options)
    assert_same_bits(tmp_path / "one", tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker"])
def test_methods_on_inputs_are_those_of_one_process(method: str, workers: Any, text: Path, tmp_path: Path) -> None:
    options = {"method": method, "keep": 0.5, "calibrate": text, "layout": "dense"}
    compress(LLAMA, tmp_path / "one", **options)
    compress(LLAMA, tmp_path / "two", cluster=workers.scheduler_address, **options)
    assert_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "size"), [("attention", {"keep": 0.5}), ("all", {"keep": 0.5}), ("mlp", {"bits": 4})])
def test_calibration_is_that_of_one_process(
    what: str, size: dict[str, float], workers: Any, text: Path, tmp_path: Path
) -> None:
    options = {"what": what, "calibrate": text, "layout": "dense", **size}
    one = compress(LLAMA, tmp_path / "one", **options)
    two = compress(LLAMA, tmp_path / "two", cluster=workers.scheduler_address, **options)
    assert_close(tmp_path / "one", tmp_path / "two")
    assert two.predicted == pytest.approx(one.predicted, rel=5e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_fit")
def test_any_number_of_workers_gives_the_same_bits(workers: Any, text: Path, tmp_path: Path) -> None:
    options = {"what": "all", "keep": 0.5, "calibrate": text}
    compress(LLAMA, tmp_path / "one", workers=1, **options)
    compress(LLAMA, tmp_path / "two", cluster=workers.scheduler_address, **options)
    assert_same_bits(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_fit")
@pytest.mark.parametrize(("stage", "at"), [("collecting statistics", 1), ("collecting statistics", 40),
                                           ("fitting layers", 2)])  # fmt: skip
def test_a_killed_worker_changes_no_bit(stage: str, at: int, workers: Any, text: Path, tmp_path: Path) -> None:
    options = {"what": "all", "keep": 0.5, "calibrate": text, "cluster": workers.scheduler_address}
    compress(LLAMA, tmp_path / "whole", **options)
    before = {nanny.pid for nanny in workers.workers.values()}
    compress(LLAMA, tmp_path / "killed", **options, progress=killing(workers, stage, at))
    assert {nanny.pid for nanny in workers.workers.values()} != before
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_fit")
def test_a_worker_that_is_killed_in_a_descent_changes_no_bit(workers: Any, text: Path, tmp_path: Path) -> None:
    options = {"what": "all", "keep": 0.5, "calibrate": text, "cluster": workers.scheduler_address}
    compress(LLAMA, tmp_path / "whole", **options)
    killed = list[int]()

    def kill() -> None:
        while not list(tmp_path.rglob("descent-1/gradient-3-*.npy")):
            time.sleep(0.001)
        killed.append(next(iter(workers.workers.values())).pid)
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    compress(LLAMA, tmp_path / "killed", **options)
    assert killed
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_fit")
def test_the_shared_fit_is_that_of_one_process(workers: Any, text: Path, tmp_path: Path) -> None:
    options = {"what": "attention", "keep": 0.5, "calibrate": text, "layout": "dense"}
    one = compress(LLAMA, tmp_path / "one", **options)
    two = compress(LLAMA, tmp_path / "two", cluster=workers.scheduler_address, **options)
    assert two.measured == pytest.approx(one.measured, rel=0.01)  # steps of Adam magnify rounding errors


@pytest.mark.slow
@pytest.mark.parametrize(("at", "resumed_by"), [(40, "one process"), (70, "workers")])
def test_an_interrupted_run_is_resumed(at: int, resumed_by: str, workers: Any, text: Path, tmp_path: Path) -> None:
    options = {"what": "all", "keep": 0.5, "calibrate": text, "layout": "dense", "spill": tmp_path / "spill"}
    with_workers = {"cluster": workers.scheduler_address}
    compress(LLAMA, tmp_path / "whole", **options, **with_workers)
    with pytest.raises(KeyboardInterrupt):
        compress(LLAMA, tmp_path / "resumed", **options, **with_workers, progress=interrupting(at))
    done = {file: file.stat().st_mtime_ns for file in (tmp_path / "spill").glob("group*")}
    done |= {file: file.stat().st_mtime_ns for file in (tmp_path / "spill").glob("chunk-*/stream-?")}
    changed = list[Path]()

    def progress(stage: str, _done: int, _total: int) -> None:
        if stage == "fitting layers":
            changed.extend(file for file, time in done.items() if file.stat().st_mtime_ns != time)

    compress(LLAMA, tmp_path / "resumed", **options, **({} if resumed_by == "one process" else with_workers),
             progress=progress)  # fmt: skip
    assert done
    assert not changed
    assert not (tmp_path / "spill").exists()
    (assert_close if resumed_by == "one process" else assert_same_bits)(tmp_path / "whole", tmp_path / "resumed")


def interrupting(at: int) -> Callable[[str, int, int], None]:
    """Return a progress callback that interrupts the call of this number of the statistics."""

    def progress(stage: str, done: int, _total: int) -> None:
        if stage == "collecting statistics" and done == at:
            raise KeyboardInterrupt

    return progress


@pytest.mark.slow
def test_statistics_in_a_file_are_used_by_workers(workers: Any, text: Path, tmp_path: Path) -> None:
    options = {"calibrate": text, "statistics": tmp_path / "statistics"}
    compress(LLAMA, tmp_path / "half", keep=0.5, cluster=workers.scheduler_address, **options)
    before = (tmp_path / "statistics").read_bytes()
    compress(LLAMA, tmp_path / "one", keep=0.7, **options)
    compress(LLAMA, tmp_path / "two", keep=0.7, cluster=workers.scheduler_address, **options)
    assert_same_bits(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "statistics").read_bytes() == before
    assert not (tmp_path / "statistics.partial").exists()


def test_wrong_arguments_are_refused_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with refused(ArgumentError, "compress", "workers and cluster exclude each other"):
        compress(LLAMA, out, keep=0.5, workers=2, cluster="tcp://127.0.0.1:8786")
    with refused(ArgumentError, "compress", "workers must be at least 1, got 0"):
        compress(LLAMA, out, keep=0.5, workers=0)
    with refused(ArgumentTypeError, "compress", "workers must be an integer, got 2.0"):
        compress(LLAMA, out, keep=0.5, workers=2.0)
    with refused(ArgumentTypeError, "compress", "cluster must be the address"):
        compress(LLAMA, out, keep=0.5, cluster=8786)
    with refused(ArgumentError, "compress", "cluster must be the address of a Dask scheduler", "'nowhere'"):
        compress(LLAMA, out, keep=0.5, cluster="nowhere")
    assert not list(tmp_path.iterdir())


def test_an_address_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tnlib_adapters.compression.cluster.connection.CONNECT_TIMEOUT", 0.2)
    arguments = ["compress", str(LLAMA), str(tmp_path / "out"), "--keep", "0.5", "--cluster", "tcp://127.0.0.1:9"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert "Error: compress: cluster must be the address of a Dask scheduler" in result.stderr
    assert "start one by `dask scheduler`" in result.stderr
    assert not list(tmp_path.iterdir())


def test_without_dask_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ModuleNotFoundError, match=r"compress: workers and cluster need dask.*'tnlib\[cluster\]'"):
        compress(LLAMA, tmp_path / "out", keep=0.5, workers=2)


def test_a_worker_that_does_not_see_the_folder(workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tnlib_adapters.compression.cluster.connection.missing_files", lambda paths: paths)
    with refused(ArgumentError, "compress", "workers that see all folders under the same paths", "shared file system"):
        compress(LLAMA, tmp_path / "out", keep=0.5, cluster=workers.scheduler_address)
    assert not list(tmp_path.iterdir())


def test_errors_of_a_task_are_those_of_one_process(workers: Any, tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "model")
    weight = open_checkpoint(tmp_path / "model").folder.tensors["model.layers.1.self_attn.q_proj.weight"]
    with weight.file.open("r+b") as opened:
        opened.seek(weight.begin)
        opened.write(b"\xff\xff\xff\xff")  # not a number in any dtype
    with refused(ValueError, "open_checkpoint", "must be finite"):
        compress(tmp_path / "model", tmp_path / "out", keep=0.5, cluster=workers.scheduler_address)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_a_cluster_that_goes_away_is_one_sentence(text: Path, tmp_path: Path) -> None:
    settings = {
        "n_workers": 1,
        "threads_per_worker": 1,
        "dashboard_address": "127.0.0.1:0",
        "silence_logs": logging.CRITICAL,
    }
    with distributed.LocalCluster(**settings, local_directory=str(tmp_path / "workers")) as cluster:

        def close(stage: str, done: int, _total: int) -> None:
            if stage == "collecting statistics" and done == 5:
                cluster.close()

        options = {"keep": 0.5, "calibrate": text, "spill": tmp_path / "spill", "progress": close}
        with refused(ClusterError, "compress", "must stay until the end", "goes on from it"):
            compress(LLAMA, tmp_path / "out", cluster=cluster.scheduler_address, **options)
    assert (tmp_path / "spill").exists()
    assert not (tmp_path / "out").exists()
