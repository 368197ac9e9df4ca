"""A folder appears whole or not at all: an error, an interrupt or a kill at any call that changes the disk."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interruptions
import numpy as np
import pytest
from checkpoint_folders import builtin_copy
from compressed_folders import digest
from interruptions import At, fail, restore_default
from oracles import refused
from slow_cases import mostly_slow
from tnlib_adapters import builtin_path, compress, open_checkpoint
from tnlib_adapters.files.atomic_folder import check_target, exchange, whole_folder

from tnlib import ArgumentError

ERRORS: dict[str, Callable[[], BaseException]] = {
    "full disk": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "keyboard": KeyboardInterrupt,
    "terminated": lambda: SystemExit(143),
}
OLD = {"old.txt": "old", "inner": "folder", "inner/deep.txt": "deep"}
NEW = {"a.txt": "new", "sub": "folder", "sub/b.txt": "new too"}
Files = dict[str, str]


def write(folder: Path, files: Files) -> None:
    if not folder.exists():
        folder.mkdir()
    for name, text in files.items():
        if text == "folder":
            (folder / name).mkdir()
        else:
            (folder / name).write_text(text)


def read(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else path.read_text()
        for path in sorted(folder.rglob("*"))
    }


def beside(target: Path) -> set[str]:
    return {path.name for path in target.parent.iterdir()} - {target.name}


# ---------------------------------------------------------------------------------------------------- whole_folder


@pytest.mark.parametrize("before", [None, {}, OLD])
def test_it_takes_the_place_of_what_was_there(before: Files | None, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if before is not None:
        write(target, before)
    with whole_folder(target) as partial:
        assert partial.parent == target.parent
        assert partial.name.startswith(".out.")
        write(partial, NEW)
        assert target.exists() == (before is not None)
    assert read(target) == NEW
    assert beside(target) == set()


def test_it_has_the_rights_of_any_new_folder(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        with whole_folder(tmp_path / "out") as partial:
            write(partial, NEW)
    finally:
        os.umask(previous)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out/a.txt").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("before", [None, {}, OLD])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_inside_leaves_everything_as_it_was(kind: str, before: Files | None, tmp_path: Path) -> None:
    target, error = tmp_path / "out", ERRORS[kind]()
    if before is not None:
        write(target, before)
    with pytest.raises(type(error)), whole_folder(target) as partial:  # noqa: PT012
        write(partial, NEW)
        raise error
    assert target.exists() == (before is not None)
    assert before is None or read(target) == before
    assert beside(target) == set()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("before", [None, {}, OLD])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_any_call(kind: str, before: Files | None, after: bool, tmp_path: Path) -> None:
    """Whatever call fails, the target is what it was or what it was to be, and no unfinished folder stays."""
    ends = []
    for number in range(1, 100):
        target = tmp_path / f"{number}" / "out"
        target.parent.mkdir()
        if before is not None:
            write(target, before)
        with At(number, fail(ERRORS[kind]()), after=after) as at:
            try:
                with whole_folder(target) as partial:
                    write(partial, NEW)
            except (OSError, KeyboardInterrupt, SystemExit):
                assert at.reached
        found = read(target) if target.exists() else None
        assert found in (before, NEW), f"call {number} left {found}"
        left = beside(target)
        assert not any("partial" in name for name in left)
        assert not left or found == NEW, f"call {number} left {left}"
        ends.append(found == NEW)
        if not at.reached:
            break
    assert ends[-1]
    assert ends == sorted(ends), "once in place, it stays in place"
    assert ends.count(False) >= 5  # a folder, two files with three synced, a rename
    assert len(ends) < 99


def test_the_old_one_comes_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "out", os.rename
    write(target, OLD)

    def refuse(a: Path, b: Path) -> None:
        if a.name.endswith(".partial"):
            raise PermissionError(errno.EPERM, "no")
        rename(a, b)

    monkeypatch.setattr("tnlib_adapters.files.atomic_folder.exchange", lambda a, b: False)  # as on other systems
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError), whole_folder(target) as partial:
        write(partial, NEW)
    assert read(target) == OLD
    assert beside(target) == set()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has renameat2")
def test_at_no_moment_is_there_nothing(tmp_path: Path) -> None:
    target, seen, end = tmp_path / "out", set(), threading.Event()
    write(target, OLD)

    def look() -> None:
        while not end.is_set():
            seen.add(os.path.exists(target))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for k in range(200):
            with whole_folder(target) as partial:
                write(partial, {"a.txt": str(k)})
    finally:
        end.set()
        watcher.join()
    assert seen == {True}
    assert read(target) == {"a.txt": "199"}
    assert beside(target) == set()


def test_folders_exchange_their_names(tmp_path: Path) -> None:
    write(tmp_path / "a", OLD)
    write(tmp_path / "b", NEW)
    done = exchange(tmp_path / "a", tmp_path / "b")
    assert read(tmp_path / "a") == (NEW if done else OLD)
    assert read(tmp_path / "b") == (OLD if done else NEW)
    if done:
        with pytest.raises(FileNotFoundError):
            exchange(tmp_path / "a", tmp_path / "missing")


def test_names_as_long_as_the_system_allows(tmp_path: Path) -> None:
    target = tmp_path / ("é" * 120)  # 240 bytes
    for files in (OLD, NEW):
        with whole_folder(target) as partial:
            write(partial, files)
    assert read(target) == NEW
    assert beside(target) == set()


def test_every_file_is_on_the_disk_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    with whole_folder(tmp_path / "out") as partial:
        write(partial, NEW)
    assert done.pop() == "rename"
    assert set(done) == {path.stat().st_ino for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]}


def test_a_relative_target_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with whole_folder(Path("out")) as partial:
        write(partial, NEW)
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert read(tmp_path / "out") == NEW


# ---------------------------------------------------------------------------------------------------- check_target


def test_targets_that_are_fine(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write(source, OLD)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "full", OLD)
    check_target("f", tmp_path / "new", source, force=False)
    check_target("f", tmp_path / "in2", source, force=False)  # its name only begins like IN
    check_target("f", tmp_path / "empty", source, force=False)
    check_target("f", tmp_path / "full", source, force=True)
    check_target("f", tmp_path / "new", None, force=False)
    assert read(tmp_path / "full") == OLD


TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "full": ("full", ("--force", "full")),
    "file": ("file.txt", ("folder", "file.txt")),
    "link to a folder": ("link", ("link",)),
    "dangling link": ("dangling", ("dangling",)),
    "inside IN": ("in/out", ("outside IN",)),
    "around IN": (".", ("outside IN",)),
    "IN itself": ("in", ("outside IN",)),
    "IN through a link": ("link_to_in", ("outside IN",)),
    "IN by a longer way": ("full/../in", ("outside IN",)),
    "no parent": ("missing/out", ("missing", "make it first")),
    "a file as parent": ("file.txt/out", ("file.txt", "make it first")),
    "a name too long": ("x" * 300, ("255 bytes", "of 300")),
    "no UTF-8": ("a\udcff", ("UTF-8",)),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_that_are_refused(case: str, tmp_path: Path) -> None:
    write(tmp_path / "in", OLD)
    write(tmp_path / "full", OLD)
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to("full")
    (tmp_path / "link_to_in").symlink_to("in")
    name, words = TARGETS[case]
    with refused(ArgumentError, "verb: ", *words):
        check_target("verb", tmp_path / name, tmp_path / "in", force=False)
    if case != "full":
        with refused(ArgumentError, *words):
            check_target("verb", tmp_path / name, tmp_path / "in", force=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with refused(ArgumentError, "verb: OUT", "written to"):
            check_target("verb", tmp_path / "out", None, force=False)
    finally:
        tmp_path.chmod(0o700)


# ------------------------------------------------------------------------------------------------------ a compression


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return builtin_copy(tmp_path / "source")


def same_but_for_the_clock(folder: Path) -> dict[str, str]:
    return {name: content for name, content in digest(folder).items() if name != "tnlib_report.json"}


def assert_complete(out: Path, whole: dict[str, str]) -> None:
    assert same_but_for_the_clock(out) == whole
    assert json.loads((out / "tnlib_report.json").read_text())["keep"] == 0.5
    checkpoint = open_checkpoint(out)
    assert all(np.isfinite(checkpoint.projections(layer).weights["q"]).all() for layer in range(2))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("force", mostly_slow([False, True], [True]))
@pytest.mark.parametrize("kind", mostly_slow(["full disk", "keyboard"], ["full disk"]))
@pytest.mark.usefixtures("without_pictures")
def test_an_error_at_any_call_of_a_compression(
    kind: str, force: bool, after: bool, source: Path, tmp_path: Path
) -> None:
    untouched = digest(source)
    compress(source, tmp_path / "whole", keep=0.5)
    whole = same_but_for_the_clock(tmp_path / "whole")
    ends = []
    for number in range(1, 300):
        out = tmp_path / f"{number}" / "out"
        out.parent.mkdir()
        if force:
            write(out, OLD)
        with At(number, fail(ERRORS[kind]()), after=after) as at:
            try:
                compress(source, out, keep=0.5, force=force)
            except (OSError, KeyboardInterrupt):
                assert at.reached
        ends.append(out.exists() and "config.json" in os.listdir(out))
        if ends[-1]:
            assert_complete(out, whole)
        else:
            assert not force or read(out) == OLD
            assert force == out.exists()
            assert beside(out) == set()
        assert not any("partial" in name for name in beside(out))
        shutil.rmtree(out.parent)
        if not at.reached:
            break
    assert ends[-1]
    assert 20 < ends.count(False) < 299
    assert digest(source) == untouched


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="deaths are those of forked processes")
@pytest.mark.parametrize("force", [False, True])
def test_a_kill_at_any_moment(force: bool, source: Path, tmp_path: Path) -> None:
    """SIGKILL before and after each call that changes the disk, and at random times."""
    untouched = digest(source)
    base, old = tmp_path / "base", tmp_path / "old"
    base.mkdir()
    write(old, OLD)
    command = [sys.executable, interruptions.__file__, str(source), str(base), str(old) if force else ""]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_env(), check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]

    whole: dict[str, str] = {}
    states: dict[str, list[str]] = {"before": [], "after": [], "timed": []}
    for line in reversed(lines):  # the last of "after" was not killed, so it says what is complete
        saved = Path(line["saved"])
        if not line["died"] and not whole:
            whole = same_but_for_the_clock(saved / "out")
    assert {"config.json", "model.safetensors", "README.md", "tnlib_report.html"} == whole.keys()
    for line in lines:
        saved = Path(line["saved"])
        out, hidden = saved / "out", [name for name in line["found"] if name != "out"]
        assert all(name.startswith(".out.") and name.endswith((".partial", ".old")) for name in hidden)
        if not out.exists():
            state = "absent"
            olds = [name for name in hidden if name.endswith(".old")]
            assert force == bool(olds)
            assert all(read(saved / name) == OLD for name in olds), "the old folder is lost"
        elif force and read_names(out) == set(OLD):
            state = "old"
            assert read(out) == OLD
        else:
            state = "new"
            assert_complete(out, whole)
        states[line["how"]].append(state)

    for how in ("before", "after"):
        assert len(states[how]) > 20
        start = "old" if force else "absent"
        assert states[how][0] == start
        assert states[how][-1] == "new"
        order = ["old", "absent", "new"] if force else ["absent", "new"]
        assert states[how] == sorted(states[how], key=order.index)
        assert not force or "absent" not in states[how] or not sys.platform.startswith("linux")
    assert len(states["timed"]) == 10
    assert digest(source) == untouched


def read_names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def clean_env() -> dict[str, str]:
    """The environment with the import path of this process and one thread, so that it can be forked."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg"}


# ------------------------------------------------------------------------------------------------ the real command

COMMAND = [sys.executable, "-m", "tnlib_adapters.cli", "compress"]
# The command, which stops in the middle of writing, says so, and goes on once there is a file named by its last word.
# A signal at any other moment may be lost: some compiled modules drop exceptions while they are imported.
PAUSED = """
import sys, time
from pathlib import Path
from tnlib_adapters.cli import main
from tnlib_adapters.compression.report import report_files as module

go = Path(sys.argv.pop())

def write_page(report, file):
    go.with_suffix(".reached").touch()
    while not go.exists():
        time.sleep(0.005)
    file.write_text("page")

module.write_page = write_page
main()
"""


def paused(source: Path, out: Path, go: Path, **options: Any) -> subprocess.Popen[str]:
    """A running command that has written nearly everything and waits for `go`."""
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSED, "compress", str(source), str(out), "--keep", "0.5", "--force", str(go)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_env(),
        **options,
    )
    until = time.monotonic() + 60
    while not go.with_suffix(".reached").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)
    assert any(name.endswith(".partial") for name in beside(out))
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_leaves_nothing_behind(number: signal.Signals, source: Path, tmp_path: Path) -> None:
    out, untouched = tmp_path / "place" / "out", digest(source)
    out.parent.mkdir()
    write(out, OLD)
    process = paused(source, out, tmp_path / "go", preexec_fn=lambda: restore_default(number))
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (1 if number == signal.SIGINT else 128 + number), errors
    assert "Traceback" not in errors
    assert read(out) == OLD
    assert beside(out) == set()
    assert digest(source) == untouched


def test_a_closed_terminal_does_not_end_what_nohup_started(source: Path, tmp_path: Path) -> None:
    out, go = tmp_path / "place" / "out", tmp_path / "go"
    out.parent.mkdir()
    process = paused(source, out, go, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    go.touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert open_checkpoint(out).n_layers == 2


def test_a_disk_that_is_really_full(source: Path, tmp_path: Path) -> None:
    """The system itself refuses to let a file grow."""
    out, untouched = tmp_path / "place" / "out", digest(source)
    out.parent.mkdir()
    limit = (builtin_path() / "model.safetensors").stat().st_size // 3
    done = subprocess.run(
        [*COMMAND, str(source), str(out), "--keep", "0.5"],
        capture_output=True,
        text=True,
        env=clean_env(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert os.strerror(errno.EFBIG) in done.stderr
    assert list(out.parent.iterdir()) == []
    assert digest(source) == untouched
