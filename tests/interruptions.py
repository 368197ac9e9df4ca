"""The end of a process, or an error, at a chosen call that changes a disk; run as a script, every death in turn.

A profile function sees each call of a C function, so that nothing of the library has to be replaced.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from compressed_folders import leave_out_pictures

CHANGES = {"write", "sendfile", "copy_file_range", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "chmod"}
FILES = (io.BufferedWriter, io.TextIOWrapper, io.FileIO)

OLD = {"old.txt": "old", "inner": "folder", "inner/deep.txt": "deep"}
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
        str(path.relative_to(folder)): "folder" if path.is_dir() else path.read_text(errors="replace")
        for path in sorted(folder.rglob("*"))
    }


def beside(target: Path) -> set[str]:
    return {path.name for path in target.parent.iterdir()} - {target.name}


class At:
    """Do something at the n-th call that changes a disk: in front of it, or right after it."""

    def __init__(self, number: int, act: Callable[[], Any], *, after: bool = False) -> None:
        self.number, self.act, self.event = number, act, "c_return" if after else "c_call"
        self.seen = 0

    @property
    def reached(self) -> bool:
        return self.seen >= self.number

    def __enter__(self) -> At:
        gc.disable()  # a collection would finalize objects of other tests, whose calls are not those of the run
        self._outer = sys.getprofile()
        sys.setprofile(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._outer)
        gc.enable()

    def _watch(self, frame: object, event: str, arg: Any) -> None:
        if event == self.event and _changes_a_disk(arg):
            self.seen += 1
            if self.seen == self.number:
                self.act()


def _changes_a_disk(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if function.__name__ == "write" and owner is not os and getattr(owner, "__name__", "") != "posix":
        return isinstance(owner, FILES) and owner not in (sys.stdout, sys.stderr)
    return function.__name__ in CHANGES and getattr(owner, "__name__", "") in ("posix", "nt", "os")


def fail(error: BaseException) -> Callable[[], NoReturn]:
    def act() -> NoReturn:
        raise error

    return act


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def restore_default(number: signal.Signals) -> None:
    """Handle a signal as in a program started from a terminal; children inherit an ignored signal, e.g. from nohup."""
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def main(source: str, base: str, old: str) -> None:
    """Kill a compression of `source` to base/out in every way; print what is left after each as a line of JSON.

    `old` is a folder that stands at base/out before, or "".
    """
    from tnlib_adapters import Budget, Run, compress

    out = Path(base) / "out"

    def run(how: str, at: int) -> bool:
        if old:
            shutil.copytree(old, out)
        pid = os.fork()
        if pid == 0:
            try:
                with At(at, die, after=how == "after"):
                    compress(source, out, Budget(keep=0.5), what="attention", run=Run(force=True))
            finally:
                os._exit(1 if sys.exc_info()[0] else 0)
        if how == "timed":
            time.sleep(random.Random(at).uniform(0, limit))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        died = os.WIFSIGNALED(status)
        assert died or status == 0
        shown = {"how": how, "at": at, "died": died, "found": sorted(p.name for p in out.parent.iterdir())}
        saved = Path(base).parent / "kept" / f"{how}-{at}"
        shutil.copytree(base, saved)
        print(json.dumps(shown | {"saved": str(saved)}))  # noqa: T201
        for path in Path(base).iterdir():
            shutil.rmtree(path)
        return died

    leave_out_pictures(pytest.MonkeyPatch())
    started = time.perf_counter()
    compress(source, out, Budget(keep=0.5), what="attention")
    limit = 1.2 * (time.perf_counter() - started)
    shutil.rmtree(out)
    for how in ("before", "after"):
        at = 1
        while run(how, at):
            at += 1
    for at in range(10):
        run("timed", 10**6 + at)


if __name__ == "__main__":
    main(*sys.argv[1:])
