"""save: files appear whole or not at all, regular files alone are replaced, modes and links stay."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib

LOW_RANK = tnlib.LowRank(np.ones((2, 1)), np.ones((1, 2)))


@pytest.mark.parametrize("fails", ["fsync", "replace"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, kind: type[BaseException]
) -> None:
    path = tmp_path / "a"
    tnlib.save(path, LOW_RANK)
    before = path.read_bytes()

    def broken(*args: Any) -> None:
        raise kind("no space left")

    monkeypatch.setattr(os, fails, broken)
    with pytest.raises(kind):
        tnlib.save(path, tnlib.LowRank(np.zeros((2, 1)), np.zeros((1, 2))))
    with pytest.raises(kind):
        tnlib.save(tmp_path / "new", LOW_RANK)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == before


def test_a_file_goes_into_a_folder_that_exists_and_does_not_replace_one(tmp_path: Path) -> None:
    value = tnlib.LowRank(np.ones((2, 1)), np.ones((1, 2)))
    with oracles.refused(FileNotFoundError, "save: the folder of path", "none"):
        tnlib.save(tmp_path / "none" / "a", value)
    with oracles.refused(ValueError, "save: path must name a file", str(tmp_path)):
        tnlib.save(tmp_path, value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str, linked: bool) -> None:
    path = there = tmp_path / "there"
    if kind == "pipe":
        os.mkfifo(there)
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(there))
        server.close()
    else:
        there = Path(os.devnull)
    if linked or kind == "device":  # a link to the device: only root can make one
        path = tmp_path / "link"
        path.symlink_to(there)
    before = there.stat()
    with oracles.refused(ValueError, "save: path must name a regular file", str(path)):
        tnlib.save(path, LOW_RANK)
    with oracles.refused(ValueError, "Picture.save: path must name a regular file"):
        (tmp_path / "link.svg").symlink_to(there)
        tnlib.draw(LOW_RANK).save(tmp_path / "link.svg")
    assert (there.stat().st_ino, there.stat().st_mode) == (before.st_ino, before.st_mode)
    assert {p.name for p in tmp_path.iterdir()} <= {"there", "link", "link.svg"}


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    there, link, chain = tmp_path / "folder" / "there", tmp_path / "link", tmp_path / "chain"
    link.symlink_to("folder/there")
    chain.symlink_to(link)
    tnlib.save(link, LOW_RANK)  # the file does not exist yet
    assert there.is_file()
    there.write_text("old")
    tnlib.save(chain, LOW_RANK)
    assert link.is_symlink()
    assert chain.is_symlink()
    assert not there.is_symlink()
    oracles.assert_same_bits(tnlib.load(there), LOW_RANK)
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["there"]


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with oracles.refused(ValueError, "save: path must name a regular file", "circular link"):
        tnlib.save(tmp_path / "circle", LOW_RANK)
    (tmp_path / "dangling").symlink_to("none/file")
    with oracles.refused(FileNotFoundError, "save: the folder of path", "none"):
        tnlib.save(tmp_path / "dangling", LOW_RANK)
    assert (tmp_path / "circle").is_symlink()
    assert (tmp_path / "dangling").is_symlink()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666])
def test_an_existing_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(mode)
    tnlib.save(path, LOW_RANK)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    oracles.assert_same_bits(tnlib.load(path), LOW_RANK)


def test_the_longest_names_are_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    tnlib.save(path, LOW_RANK)
    oracles.assert_same_bits(tnlib.load(path), LOW_RANK)


def test_readers_see_the_old_or_the_new_file_and_no_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (tnlib.LowRank(c * np.ones((2, 1)), np.ones((1, 2))) for c in (1.0, 2.0))
    path, real, seen = tmp_path / "a", os.replace, []
    tnlib.save(path, old)

    def watched(source: Any, target: Any) -> None:
        oracles.assert_same_bits(tnlib.load(path), old)
        oracles.assert_same_bits(tnlib.load(source), new)
        assert Path(source).parent == path.parent, "a rename across file systems is not atomic"
        seen.append(source)
        real(source, target)

    monkeypatch.setattr(os, "replace", watched)
    tnlib.save(path, new)
    assert len(seen) == 1
    oracles.assert_same_bits(tnlib.load(path), new)


@pytest.mark.skipif(os.name != "posix", reason="permission bits are those of POSIX")
def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        tnlib.save(tmp_path / "a", tnlib.LowRank(np.ones((2, 1)), np.ones((1, 2))))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
