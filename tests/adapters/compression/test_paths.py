"""IN and OUT as they come: with spaces, relative, behind links, read-only."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_folders import builtin_copy
from click.testing import Result
from command_line import run_command
from compressed_folders import digest
from oracles import assert_one_sentence
from tnlib_adapters import Budget, compress, open_checkpoint

WRITTEN = {"README.md", "config.json", "model.safetensors", "tnlib_report.html", "tnlib_report.json"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return builtin_copy(tmp_path / "in")


pytestmark = pytest.mark.usefixtures("without_pictures")


def link(path: Path, to: Path) -> Path:
    path.symlink_to(to)
    return path


def compressed(source: Path | str, out: Path | str, *options: str, status: int = 0) -> Result:
    return run_command("compress", source, out, "--keep", "0.5", "--what", "attention", *options, status=status)


def test_spaces_brackets_and_slashes(tmp_path: Path, place: Path) -> None:
    source = builtin_copy(tmp_path / "my [bold]model[/bold] é")
    got = compressed(f"{source}/", f"{place}/out [red] here/")
    out = place / "out [red] here"
    assert open_checkpoint(out).n_layers == 2
    assert out.name in got.stdout
    assert json.loads((out / "tnlib_report.json").read_text())["source"].endswith(source.name)


def test_relative_paths(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    compressed("../in", "out")
    assert open_checkpoint(place / "out").n_layers == 2
    assert [path.name for path in place.iterdir()] == ["out"]
    monkeypatch.chdir(source)
    compressed(".", "../place/two")
    assert_one_sentence(compressed(".", "out", status=2).stderr, ("outside IN",))
    monkeypatch.chdir(place / "out")
    refusal = compressed("../../in", ".", "--force", status=2)
    assert_one_sentence(refusal.stderr, ("current folder",))
    assert {path.name for path in (place / "out").iterdir()} == WRITTEN


def test_a_folder_and_files_behind_links(source: Path, place: Path, tmp_path: Path) -> None:
    """Model hubs keep the files of a folder as links into a store of blobs."""
    blobs, hub = tmp_path / "models--a/blobs", tmp_path / "models--a/snapshots/main"
    shutil.copytree(source, blobs)
    hub.mkdir(parents=True)
    for path in blobs.iterdir():
        (hub / path.name).symlink_to(path)
    untouched = digest(source), digest(hub)
    for number, one in enumerate((link(tmp_path / "link", source), hub)):
        out = place / str(number)
        compressed(one, out)
        assert not any(path.is_symlink() for path in out.rglob("*"))
        assert {path.name for path in out.iterdir()} == WRITTEN
    assert (digest(source), digest(hub)) == untouched


def test_a_folder_that_may_only_be_read(source: Path, place: Path) -> None:
    writable = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    for path in [*source.iterdir(), source]:
        path.chmod(path.stat().st_mode & ~writable)
    try:
        compressed(source, place / "out")
        assert all(path.stat().st_mode & stat.S_IWUSR for path in [place / "out", *(place / "out").iterdir()])
        compressed(source, place / "out", "--force")
    finally:
        for path in [source, *source.iterdir()]:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


TARGETS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "a dangling link": (lambda source, place: link(place / "out", place / "nothing"), "folder"),
    "IN with dots": (lambda source, place: source / ".." / source.name, "outside IN"),
    "IN through a link": (lambda source, place: link(place / "out", source), "OUT"),
    "inside IN through a link": (lambda source, place: link(place / "link", source) / "out", "outside IN"),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("case", TARGETS)
def test_targets_behind_links(case: str, force: bool, source: Path, place: Path) -> None:
    make, words = TARGETS[case]
    out = make(source, place)
    untouched = digest(source.parent)
    got = compressed(source, out, *(["--force"] if force else []), status=2)
    assert_one_sentence(got.stderr, (words,))
    assert digest(source.parent) == untouched


def test_a_reason_is_given_once_and_not_for_every_method(source: Path, place: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "once", Budget(keep=0.5), what="attention")
    got = compressed(tmp_path / "once", place / "out", status=2)
    assert_one_sentence(got.stderr, ("compressed already",))
    assert got.stderr.count("compressed already") == 1
    assert list(place.iterdir()) == []
