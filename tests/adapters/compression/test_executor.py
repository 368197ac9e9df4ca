"""Compression by several processes: the same bits as in one, and one sentence when a process is lost."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_command
from slow_cases import mostly_slow

pytest.importorskip("torch")
pytest.importorskip("transformers")
dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

from compressed_folders import by_options  # noqa: E402
from oracles import refused  # noqa: E402
from tnlib_adapters import Budget, Run, builtin_path, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.executor import SERIAL, Workers, open_executor  # noqa: E402
from tnlib_adapters.compression.methods.quantized import QuantizedWeight  # noqa: E402

from tnlib import ArgumentTypeError, ClusterError  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")

LLAMA = builtin_path("llama")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Dask cluster of two processes, started again when they die."""
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        local_directory=str(tmp_path_factory.mktemp("workers")),
        silence_logs=logging.CRITICAL,
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text in the language of the built-in Llama."""
    file = tmp_path_factory.mktemp("text") / "code.txt"
    file.write_text(Path(tarfile.__file__).read_text(encoding="utf-8")[3000:23_000], encoding="utf-8")
    return file


def assert_same_bits(folder: Path, other: Path) -> None:
    expected, values = (open_checkpoint(own).folder.tensors for own in (folder, other))
    assert values.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(values[name].read_stored(), tensor.read_stored())


def test_results_have_the_order_of_the_calls() -> None:
    with ThreadPoolExecutor(4) as pool:
        for workers in (SERIAL, Workers(pool, 3)):
            calls = (partial(_after, 0.01 * (k % 3), k) for k in range(8))
            assert list(workers.map(calls)) == list(range(8))
            with pytest.raises(ZeroDivisionError):
                list(workers.map([partial(divmod, 1, 0)]))


def _after(seconds: float, value: int) -> int:
    time.sleep(seconds)
    return value


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("method", mostly_slow(["heads", "tucker"], ["tucker"]))
def test_plain_methods_have_the_bits_of_one_process(method: str, tmp_path: Path) -> None:
    compress(LLAMA, tmp_path / "one", Budget(keep=0.5), method=method, what="attention")
    with open_executor(workers=2) as pool:
        compress(LLAMA, tmp_path / "two", Budget(keep=0.5), method=method, what="attention", run=Run(executor=pool))
    assert_same_bits(tmp_path / "one", tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"what": "all", "bits": 3}, {"what": "all", "keep": 0.5}])
def test_methods_on_a_text_have_the_bits_of_one_process(
    options: dict[str, Any], cluster: Any, text: Path, tmp_path: Path
) -> None:
    compress(LLAMA, tmp_path / "one", **by_options(calibrate=text, **options))
    for name, workers in (("pool", {"workers": 2}), ("dask", {"cluster": cluster.scheduler_address})):
        with open_executor(**workers) as executor:
            compress(LLAMA, tmp_path / name, **by_options(calibrate=text, executor=executor, **options))
        assert_same_bits(tmp_path / "one", tmp_path / name)


@pytest.mark.slow
def test_options_of_integers_are_measured_by_the_workers(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizedWeight, "_whole", lambda _: pytest.fail("measured in the main process"))
    with open_executor(workers=1) as pool:
        run = Run(executor=pool)
        report = compress(
            LLAMA, tmp_path / "out", Budget(bits=4), calibration=text, what="attention", effort="low", run=run
        )
    assert report.bits == 4


@pytest.mark.slow
def test_statistics_of_one_process_are_used_by_workers(text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"calibrate": text, "folder": tmp_path / "statistics"}
    compress(LLAMA, tmp_path / "first", **by_options(keep=0.5, **options))
    compress(LLAMA, tmp_path / "one", **by_options(keep=0.7, **options))
    with open_executor(workers=2) as pool:
        compress(LLAMA, tmp_path / "two", **by_options(keep=0.7, executor=pool, **options))
    assert_same_bits(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_dask_repeats_the_calls_of_a_killed_worker(cluster: Any, text: Path, tmp_path: Path) -> None:
    before = {nanny.pid for nanny in cluster.workers.values()}

    def kill(stage: str, done: int, _total: int) -> None:
        if stage == "collecting statistics" and done == 1:
            os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)

    options: dict[str, Any] = {"bits": 3, "calibrate": text}
    with open_executor(cluster.scheduler_address) as executor:
        compress(LLAMA, tmp_path / "whole", **by_options(executor=executor, **options))
        compress(LLAMA, tmp_path / "killed", **by_options(executor=executor, progress=kill, **options))
    assert {nanny.pid for nanny in cluster.workers.values()} != before
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")


def test_a_process_that_ends_is_one_sentence() -> None:
    with (
        open_executor(workers=1) as pool,
        refused(ClusterError, "compress", "workers must stay", "pass fewer"),
    ):
        list(Workers.of(pool).map([partial(os._exit, 1)] * 3))


def test_nothing_is_written_when_a_process_is_killed(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())

    def kill() -> None:
        # Both: the pool of Python 3.11 fails in a thread of its own where one ends while the other is being added.
        while len(children := set(multiprocessing.active_children()) - others) < 2:
            time.sleep(0.001)
        children.pop().kill()  # while it imports the library

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with refused(ClusterError, "compress", "workers must stay until the end"), open_executor(workers=2) as pool:
        compress(LLAMA, tmp_path / "out", Budget(keep=0.5), what="attention", run=Run(executor=pool))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_cluster_that_goes_away_is_one_sentence(text: Path, tmp_path: Path) -> None:
    with distributed.LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        local_directory=str(tmp_path / "workers"),
        silence_logs=logging.CRITICAL,
    ) as opened:

        def close(stage: str, done: int, _total: int) -> None:
            if stage == "collecting statistics" and done == 5:
                opened.close()

        options = {"keep": 0.5, "calibrate": text, "folder": tmp_path / "run", "progress": close}
        with (
            refused(ClusterError, "compress", "workers must stay until the end"),
            open_executor(opened.scheduler_address) as executor,
        ):
            compress(LLAMA, tmp_path / "out", **by_options(executor=executor, **options))
    assert (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_refused_before_any_work(tmp_path: Path) -> None:
    for options, message in (
        (["--workers", "2", "--cluster", "tcp://127.0.0.1:8786"], "workers and cluster exclude each other"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
        (["--cluster", "nowhere"], "cluster must be the address of a Dask scheduler with workers, got 'nowhere'"),
    ):
        result = run_command("compress", str(LLAMA), str(tmp_path / "out"), "--keep", "0.5", *options, status=2)
        assert f"Error: compress: {message}" in result.stderr
    with refused(ArgumentTypeError, "Run", "executor must be a concurrent.futures.Executor, got 2"):
        Run(executor=2)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_an_address_that_does_not_answer(tmp_path: Path) -> None:
    arguments = ["compress", str(LLAMA), str(tmp_path / "out"), "--keep", "0.5", "--cluster", "tcp://127.0.0.1:9"]
    with dask.config.set({"distributed.comm.timeouts.connect": "0.2s"}):
        result = run_command(*arguments, status=2)
    assert "Error: compress: cluster must be the address of a Dask scheduler" in result.stderr
    assert "start them by `dask scheduler`" in result.stderr
    assert not list(tmp_path.iterdir())


def test_without_dask_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    missing = pytest.raises(ModuleNotFoundError, match=r"compress: cluster needs 'tnlib\[cluster\]'.*distributed")
    with missing, open_executor("tcp://127.0.0.1:8786"):
        pass
