"""A folder appears whole or not at all: an error, an interrupt or a kill at any call that changes the disk."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interruptions import OLD, At, Files, beside, fail, read, write
from oracles import refused
from tnlib_adapters.files.atomic_folder import check_target, exchange, whole_folder

from tnlib import ArgumentError

ERRORS: dict[str, Callable[[], BaseException]] = {
    "full disk": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "keyboard": KeyboardInterrupt,
    "terminated": lambda: SystemExit(143),
}
NEW = {"a.txt": "new", "sub": "folder", "sub/b.txt": "new too"}


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


@pytest.mark.slow
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
