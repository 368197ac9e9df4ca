"""The commands themselves, pictures and all, ended at any moment: a folder that is whole, or none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import builtin_copy
from click.testing import CliRunner
from compressed_folders import digest, n_attention, read_tensors
from interruptions import At, fail, restore_default
from tnlib_adapters import open_checkpoint
from tnlib_adapters.cli import main

pytestmark = pytest.mark.slow

OLD = {"old.txt": "old", "inner/deep.txt": "deep"}
COMPRESS = ["compress", "IN", "OUT", "--keep", "0.5", "--force"]

# A process of its own and without threads, so that it can be forked: one child for every death.
DRIVER = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from interruptions import At, die
from tnlib_adapters.cli import main

arguments, place, old, kept, few = json.loads(sys.argv[1])
place, kept = Path(place), Path(kept)

def command():
    main(arguments, "tnlib", standalone_mode=False)

def child(act):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            act()
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    return pid

def killed_at(number, after):
    with At(number, die, after=after):
        command()

def fresh():
    for path in place.iterdir():
        shutil.rmtree(path)
    if old:
        shutil.copytree(old, place / "out")

def note(how, at, pid):
    status = os.waitpid(pid, 0)[1]
    saved = kept / f"{how}-{at}"
    shutil.copytree(place, saved)
    print(json.dumps({"how": how, "at": at, "saved": str(saved), "killed": os.WIFSIGNALED(status), "status": status}))

stdout, stderr = os.dup(1), os.dup(2)
quiet = os.open(os.devnull, os.O_WRONLY)
fresh()
os.dup2(quiet, 1), os.dup2(quiet, 2)
command()  # fonts are looked for, and what was found is written down, only once
fresh()
started = time.perf_counter()
with At(10**9, die) as counted:
    command()
seconds = time.perf_counter() - started
sys.stdout.flush()
os.dup2(stdout, 1), os.dup2(stderr, 2)
numbers = range(1, counted.seen + 1)
for at in sorted({*numbers[::few], *numbers[-2:]}):
    how = "before" if at % 2 else "after"
    fresh()
    note(how, at, child(lambda: killed_at(at, how == "after")))
for at in range(3):
    fresh()
    pid = child(command)
    time.sleep(random.Random(at).uniform(0, seconds))
    os.kill(pid, signal.SIGKILL)
    note("timed", at, pid)
fresh()
note("whole", 0, child(command))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin_copy(tmp_path_factory.mktemp("source") / "in")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for OUT, so that whatever is left beside it is seen."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def filled(command: list[str], source: Path, out: Path) -> list[str]:
    return [{"IN": str(source), "OUT": str(out)}.get(word, word) for word in command]


def write_old(folder: Path) -> Path:
    for name, text in OLD.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def is_old(folder: Path) -> bool:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return names == set(OLD) and all((folder / name).read_text() == text for name, text in OLD.items())


def environment() -> dict[str, str]:
    """The import path of this process, and one thread."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OPENBLAS_NUM_THREADS": "1"}


def assert_whole(out: Path, whole: dict[str, str]) -> None:
    """Everything that an undisturbed run writes, equal where the clock does not show."""
    found = digest(out)
    assert found.keys() == whole.keys()
    for name in ("model.safetensors", "config.json"):
        assert found[name] == whole[name]
    report = json.loads((out / "tnlib_report.json").read_text())
    assert report["n_after"] == n_attention(out)
    assert (out / "tnlib_report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert open_checkpoint(out).n_layers == 2
    assert len(read_tensors(out)) > 3


def test_killed(source: Path, place: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    untouched = digest(source)
    old = write_old(tmp_path / "old")
    told = [filled(COMPRESS, source, place / "out"), str(place), str(old), str(tmp_path / "kept"), 15]
    arguments = [sys.executable, "-c", DRIVER, json.dumps(told)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert digest(source) == untouched

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    last = lines.pop()
    assert (last["how"], last["status"]) == ("whole", 0)
    whole = digest(Path(last["saved"]) / "out")
    states: dict[str, list[str]] = {"before": [], "after": [], "timed": []}
    for line in lines:
        saved = Path(line["saved"])
        states[line["how"]].append(state := _state(saved, whole))
        assert line["killed"] or (state == "new" and line["status"] == 0)
        if state == "absent":
            aside = [path for path in saved.iterdir() if path.name != "out" and is_old(path)]
            assert len(aside) == 1, "the old folder is lost"
    assert states["before"][0] == "old"  # in front of the first change
    assert sum(line["killed"] for line in lines if line["how"] != "timed") >= 3
    assert len(states["timed"]) == 3


def _state(saved: Path, whole: dict[str, str]) -> str:
    out = saved / "out"
    assert all(path.name == "out" or path.name.startswith(".out.") for path in saved.iterdir())
    if not out.exists():
        return "absent"
    if is_old(out):
        return "old"
    assert_whole(out, whole)
    return "new"


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
def test_a_full_disk(force: bool, source: Path, place: Path) -> None:
    """At every call that changes the disk: one sentence, and everything as it was."""
    untouched, text = digest(source), os.strerror(errno.ENOSPC)
    arguments, failed = filled(COMPRESS, source, place / "out"), 0
    for number in range(1, 200):
        shutil.rmtree(place)
        place.mkdir()
        if force:
            write_old(place / "out")
        at = At(number, fail(OSError(errno.ENOSPC, text)))
        got = call(arguments, at)
        assert got.exception is None or isinstance(got.exception, SystemExit), got.exception
        if not at.reached:
            assert got.exit_code == 0, got.output
            break
        if got.exit_code == 0:  # only what clears away may fail and be passed over
            assert (place / "out").is_dir()
            assert not is_old(place / "out")
            continue
        failed += 1
        assert got.exit_code == 2
        assert [line for line in got.stderr.splitlines() if line.startswith("Error: ")]
        assert text in got.stderr.splitlines()[-1]
        if not (place / "out").exists():
            assert not force
            assert list(place.iterdir()) == []
        elif is_old(place / "out"):
            assert [path.name for path in place.iterdir()] == ["out"]
    else:
        pytest.fail("the command never came to its end")
    assert failed > 3
    assert digest(source) == untouched


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupt(number: int, source: Path, place: Path) -> None:
    write_old(place / "out")
    at = At(number, fail(KeyboardInterrupt()), after=True)
    got = call(filled(COMPRESS, source, place / "out"), at)
    assert at.reached
    assert got.exit_code == 1
    assert "Abort" in got.stderr
    assert is_old(place / "out")
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.usefixtures("without_pictures", "default_handler")
@pytest.mark.parametrize("error", [ImportError("initialization failed"), OSError(errno.EIO, "no file")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_that_a_library_hides(number: signal.Signals, error: Exception, source: Path, place: Path) -> None:
    """Modules in C put an error of their own in the place of what ends them while they are being loaded."""

    def hide() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        raise error

    write_old(place / "out")
    before = signal.getsignal(number)
    got = call(filled(COMPRESS, source, place / "out"), At(2, hide, after=True))
    assert got.exit_code == (1 if number == signal.SIGINT else 128 + number)
    assert "Error" not in got.stderr
    assert signal.getsignal(number) == before
    assert is_old(place / "out")
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.usefixtures("without_pictures", "default_handler")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_that_a_library_swallows(number: signal.Signals, source: Path, place: Path) -> None:
    def swallow() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)

    write_old(place / "out")
    got = call(filled(COMPRESS, source, place / "out"), At(2, swallow, after=True))
    assert got.exit_code == (1 if number == signal.SIGINT else 128 + number)
    assert is_old(place / "out")
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_end(number: signal.Signals, source: Path, place: Path) -> None:
    untouched = digest(source)
    write_old(place / "out")
    arguments = [sys.executable, "-m", "tnlib_adapters.cli", *filled(COMPRESS, source, place / "out")]
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: restore_default(number),
    )
    until = time.monotonic() + 60
    while len(list(place.iterdir())) == 1 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (1 if number == signal.SIGINT else 128 + number), errors
    assert "Traceback" not in errors
    assert is_old(place / "out")
    assert [path.name for path in place.iterdir()] == ["out"]
    assert digest(source) == untouched


def test_a_disk_that_is_really_full(source: Path, place: Path) -> None:
    """The system itself refuses to let a file grow, at several sizes."""
    resource = pytest.importorskip("resource")
    size = (source / "model.safetensors").stat().st_size
    for limit in (1, 4096, size // 4):
        done = subprocess.run(
            [sys.executable, "-m", "tnlib_adapters.cli", *filled(COMPRESS, source, place / "out")],
            capture_output=True,
            text=True,
            env=environment() | {"PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert os.strerror(errno.EFBIG) in done.stderr.splitlines()[-1]
        assert list(place.iterdir()) == []
