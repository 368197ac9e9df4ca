"""The folder of a run: resumed after an interruption or a kill, refused for another call, removed at the end."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracles
import out_of_core_cases
import pytest
from out_of_core_cases import CALLS, TENSORS

import tnlib
from tnlib import Storage
from tnlib.out_of_core.passes import observed_passes, read_ahead

MEMORY = 1 << 20  # bytes
LIMITED, HALF = (Storage(memory=MEMORY // n) for n in (1, 2))


def noisy(n: int = 20) -> np.ndarray:
    return out_of_core_cases.noisy(shape=(n, 24, 30, 8))


class Interrupted(Exception):
    pass


def interrupt_after(count: int) -> Callable[[str, int, int], None]:
    calls = iter(range(count))

    def observer(stage: str, done: int, total: int) -> None:
        if next(calls, None) is None:
            raise Interrupted

    return observer


class InterruptedRuns:
    """Calls on one array in a file that are interrupted after a share of their tiles."""

    def __init__(self, name: str, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", noisy(60))
        self._call, self._x = CALLS[name], np.load(tmp_path / "x.npy", mmap_mode="r")
        self.folder, self.tiles = tmp_path / "run", list[str]()
        with observed_passes(lambda stage, done, total: self.tiles.append(stage)):
            self.uninterrupted = self._call(self._x, rtol=1e-2, storage=Storage(memory=2 * MEMORY))

    def interrupt(self, share: float) -> None:
        with observed_passes(interrupt_after(int(share * len(self.tiles)))), pytest.raises(Interrupted):
            self.run()

    def run(self) -> tnlib.Fit[Any]:
        return self._call(self._x, rtol=1e-2, storage=Storage(memory=2 * MEMORY, folder=self.folder))


@pytest.mark.parametrize("name", TENSORS)
def test_an_interrupted_run_is_resumed(name: str, tmp_path: Path) -> None:
    runs = InterruptedRuns(name, tmp_path)
    runs.interrupt(0.75)
    assert runs.folder.is_dir()
    resumed: list[str] = []
    with observed_passes(lambda stage, done, total: resumed.append(stage)):
        fit = runs.run()
    oracles.assert_same_bits(fit.value, runs.uninterrupted.value)
    assert len(resumed) < len(runs.tiles)
    assert not runs.folder.exists()


def test_an_interrupted_pass_does_not_wait_for_its_reader() -> None:
    """The garbage collector may close it in a thread that holds locks of other threads."""
    may_read, done = threading.Event(), threading.Event()

    def read(tile: int) -> np.ndarray:
        if tile:
            assert may_read.wait(60)
            done.set()
        return np.zeros(1)

    tiles: Any = read_ahead(SimpleNamespace(read=read), [0, 1])  # type: ignore[arg-type, list-item]
    next(tiles)
    tiles.close()
    assert not done.is_set()
    may_read.set()
    assert done.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tt_svd", "tucker"])
def test_a_folder_that_was_changed_gives_the_same_result_or_is_refused(name: str, tmp_path: Path) -> None:
    """Every file of an interrupted run flipped in one bit, cut short, or left out."""
    runs, kept = InterruptedRuns(name, tmp_path), tmp_path / "kept"
    rng = np.random.default_rng(0)
    outcomes = set()
    for share in (0.45, 0.95):
        shutil.rmtree(runs.folder, ignore_errors=True)
        runs.interrupt(share)
        shutil.move(runs.folder, kept)
        for file in sorted(kept.iterdir()):
            for change in ("flip", "cut", "remove"):
                shutil.rmtree(runs.folder, ignore_errors=True)
                shutil.copytree(kept, runs.folder)
                content = bytearray(file.read_bytes())
                if change == "flip" and content:
                    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
                (runs.folder / file.name).write_bytes(content[: len(content) // 2] if change == "cut" else content)
                if change == "remove":
                    (runs.folder / file.name).unlink()
                try:
                    fit = runs.run()
                except tnlib.ArgumentError:
                    outcomes.add("refused")
                else:
                    oracles.assert_same_bits(fit.value, runs.uninterrupted.value)
                    outcomes.add("same")
        shutil.rmtree(kept)
    assert outcomes == {"refused", "same"}


def test_the_folder_of_another_call_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", noisy())
    a, storage = np.load(tmp_path / "x.npy", mmap_mode="r"), Storage(memory=MEMORY, folder=tmp_path / "run")
    with observed_passes(interrupt_after(2)), pytest.raises(Interrupted):
        tnlib.tt_svd(a, rtol=1e-2, storage=storage)
    with oracles.refused(ValueError, "tt_svd", "storage.folder", "other"):
        tnlib.tt_svd(a, rtol=1e-3, storage=storage)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("text")
    with oracles.refused(ValueError, "tt_svd", "storage.folder", "other files"):
        tnlib.tt_svd(a, rtol=1e-2, storage=Storage(memory=MEMORY, folder=other))
    assert (other / "mine").read_text() == "text"


def test_temporary_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    x = noisy()
    tnlib.tucker(x, max_rank=(20, 24, 2, 8), storage=HALF)
    x[-1, -1] = np.nan
    with oracles.refused(ValueError, "finite"):
        tnlib.tucker(x, rtol=1e-2, storage=LIMITED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are those of Unix")
@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_sentence_and_the_run_is_resumed(
    problem: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    np.save(tmp_path / "x.npy", noisy())
    a, folder = np.load(tmp_path / "x.npy", mmap_mode="r"), tmp_path / "run"
    ranks, storage = (20, 24, 2, 8), Storage(memory=MEMORY // 2, folder=folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if problem == errno.EFBIG:  # the system's own refusal
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    else:

        def refuse(*_: Any) -> None:
            raise OSError(problem, os.strerror(problem))

        monkeypatch.setattr("os.posix_fallocate", refuse)
    try:
        with oracles.refused(ValueError, "tucker", "storage.folder", "room", str(folder)):
            tnlib.tucker(a, max_rank=ranks, storage=storage)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    fit = tnlib.tucker(a, max_rank=ranks, storage=storage)
    oracles.assert_same_bits(fit.value, tnlib.tucker(a, max_rank=ranks, storage=HALF).value)
    assert not folder.exists()


KILLED = """
import os, signal, sys, numpy as np, tnlib
from tnlib.out_of_core.passes import observed_passes, read_ahead
calls = iter(range(int(sys.argv[2])))
def kill(stage, done, total):
    if next(calls, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
with observed_passes(kill):
    storage = tnlib.Storage(memory=1 << 20, folder=sys.argv[3])
    tnlib.tucker(np.load(sys.argv[1], mmap_mode="r"), rtol=1e-2, storage=storage)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [10, 70, 100, 140])
def test_a_killed_run_is_resumed(tiles: int, tmp_path: Path) -> None:
    path, folder = tmp_path / "x.npy", tmp_path / "run"
    np.save(path, noisy(120))
    a = np.load(path, mmap_mode="r")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(tiles), str(folder)], check=False)
    assert done.returncode == -9
    fit = tnlib.tucker(a, rtol=1e-2, storage=Storage(memory=MEMORY, folder=folder))
    oracles.assert_same_bits(fit.value, tnlib.tucker(a, rtol=1e-2, storage=LIMITED).value)
    assert not folder.exists()
