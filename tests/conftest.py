"""One deterministic hypothesis profile, and a limit on the memory of every process that runs tests."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

MEMORY_LIMIT = 2000  # MB
# Workers of `make test` write their files here, where it has room: written files are flushed, which takes milliseconds
# on a disk.
IN_MEMORY, ROOM = Path("/dev/shm"), 4 << 30  # bytes

# The same examples on every machine and in every run.
settings.register_profile(
    "tnlib",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tnlib")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection: fifteen thousand tests and the modules that they import are all kept."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


PEAKS = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PEAKS] = {}
    is_quick = config.option.markexpr == "not slow"
    if is_quick and IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > ROOM:
        os.environ.setdefault("TMPDIR", str(IN_MEMORY))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a process of `make test` held more than the limit; workers send theirs to the controller."""
    status = Path("/proc/self/status")
    if not status.exists() or session.config.option.markexpr != "not slow":
        return
    peak = int(status.read_text(encoding="ascii").partition("VmHWM:")[2].split()[0]) // 1024
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = peak
        return
    peaks = session.config.stash[PEAKS]
    peaks["main"] = peak
    if max(peaks.values()) > MEMORY_LIMIT:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the peak of a worker of xdist."""
    if "peak" in getattr(node, "workeroutput", {}):
        node.config.stash[PEAKS][node.gateway.id] = node.workeroutput["peak"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    peaks = config.stash[PEAKS]
    if peaks:
        held = ", ".join(f"{name} {peak} MB" for name, peak in peaks.items())
        terminalreporter.line(f"peak memory: {held}; at most {MEMORY_LIMIT} MB")
