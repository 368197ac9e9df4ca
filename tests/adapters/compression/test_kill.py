"""Compressions ended at any moment, by errors, signals and deaths: a folder that is whole, or none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interruptions
import numpy as np
import pytest
from checkpoint_folders import builtin_copy
from click.testing import CliRunner
from compressed_folders import digest
from interruptions import OLD, At, beside, fail, read, restore_default, write
from tnlib_adapters import Budget, Run, builtin_path, compress, open_checkpoint
from tnlib_adapters.cli import main

ERRORS: dict[str, Callable[[], BaseException]] = {
    "full disk": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "keyboard": KeyboardInterrupt,
}
ARGUMENTS = ["compress", "IN", "OUT", "--keep", "0.5", "--what", "attention", "--force"]


def filled(source: Path, out: Path) -> list[str]:
    return [{"IN": str(source), "OUT": str(out)}.get(word, word) for word in ARGUMENTS]


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


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["full disk", "keyboard"])
@pytest.mark.usefixtures("without_pictures")
def test_an_error_at_any_call_of_a_compression(
    kind: str, force: bool, after: bool, source: Path, tmp_path: Path
) -> None:
    untouched = digest(source)
    compress(source, tmp_path / "whole", Budget(keep=0.5), what="attention")
    whole = same_but_for_the_clock(tmp_path / "whole")
    ends = []
    for number in range(1, 300):
        out = tmp_path / f"{number}" / "out"
        out.parent.mkdir()
        if force:
            write(out, OLD)
        with At(number, fail(ERRORS[kind]()), after=after) as at:
            try:
                compress(source, out, Budget(keep=0.5), what="attention", run=Run(force=force))
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
        elif force and {str(path.relative_to(out)) for path in out.rglob("*")} == set(OLD):
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
from tnlib_adapters.compression import report_page as module

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
        [sys.executable, "-c", PAUSED, *filled(source, out), str(go)],
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


@pytest.mark.slow
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
        [*COMMAND, str(source), str(out), "--keep", "0.5", "--what", "attention"],
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


# --------------------------------------------------------------------------------------- what can still be said


@pytest.fixture
def default_handler(number: signal.Signals) -> Iterator[None]:
    """The default handler of a signal, which the command replaces; one that is ignored it leaves alone."""
    before = signal.getsignal(number)
    restore_default(number)
    yield
    signal.signal(number, before)


def call(arguments: list[str], at: At) -> Any:
    with at:
        return CliRunner().invoke(main, arguments)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.slow
def test_a_full_disk(force: bool, source: Path, place: Path) -> None:
    """At every call that changes the disk: one sentence, and everything as it was."""
    untouched, text = digest(source), os.strerror(errno.ENOSPC)
    arguments, failed = filled(source, place / "out"), 0
    for number in range(1, 200):
        shutil.rmtree(place)
        place.mkdir()
        if force:
            write(place / "out", OLD)
        at = At(number, fail(OSError(errno.ENOSPC, text)))
        got = call(arguments, at)
        assert got.exception is None or isinstance(got.exception, SystemExit), got.exception
        if not at.reached:
            assert got.exit_code == 0, got.output
            break
        if got.exit_code == 0:  # only what clears away may fail and be passed over
            assert (place / "out").is_dir()
            assert read(place / "out") != OLD
            continue
        failed += 1
        assert got.exit_code == 2
        assert [line for line in got.stderr.splitlines() if line.startswith("Error: ")]
        assert text in got.stderr.splitlines()[-1]
        if not (place / "out").exists():
            assert not force
            assert list(place.iterdir()) == []
        elif read(place / "out") == OLD:
            assert [path.name for path in place.iterdir()] == ["out"]
    else:
        pytest.fail("the command never came to its end")
    assert failed > 3
    assert digest(source) == untouched


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.slow
def test_an_interrupt(number: int, source: Path, place: Path) -> None:
    write(place / "out", OLD)
    at = At(number, fail(KeyboardInterrupt()), after=True)
    got = call(filled(source, place / "out"), at)
    assert at.reached
    assert got.exit_code == 1
    assert "Abort" in got.stderr
    assert read(place / "out") == OLD
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.usefixtures("without_pictures", "default_handler")
@pytest.mark.parametrize("error", [ImportError("initialization failed"), OSError(errno.EIO, "no file"), None])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_an_end_that_a_library_hides(
    number: signal.Signals, error: Exception | None, source: Path, place: Path
) -> None:
    """Modules in C put an error of their own, or none, in the place of what ends them while they are being loaded."""

    def hide() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        if error is not None:
            raise error

    write(place / "out", OLD)
    before = signal.getsignal(number)
    got = call(filled(source, place / "out"), At(2, hide, after=True))
    assert got.exit_code == (1 if number == signal.SIGINT else 128 + number)
    assert "Error" not in got.stderr
    assert signal.getsignal(number) == before
    assert read(place / "out") == OLD
    assert [path.name for path in place.iterdir()] == ["out"]
