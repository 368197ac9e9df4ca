"""Files that a process opens, and the memory that it may take (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

FREE_MEMORY = 64 << 20  # bytes that a file of any size may take
MEMORY_RATIO = 10
_IN_OPEN = 0x20


class OpenedOutside:
    """Count what is opened outside of a folder: by Python, and by libraries in the folder `outside`."""

    def __init__(self, inside: Path, outside: Path) -> None:
        self._inside = str(inside.resolve())
        self._allowed = (self._inside, sys.prefix, sys.base_prefix, "/proc/", "/sys/", str(Path(__file__).parents[2]))
        self._paths: list[str] = []
        self._is_watching = False
        sys.addaudithook(self._audit)
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_NONBLOCK)
        for file in [outside, *outside.iterdir()]:
            libc.inotify_add_watch(self._events, str(file).encode(), _IN_OPEN)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and self._is_watching and isinstance(arguments[0], str | bytes):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith(self._allowed):
                self._paths.append(path)

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[str]]:
        """Yield a list that holds at the end what was opened outside in the block."""
        self._any_event()  # of the mutation, which makes the links
        self._paths, self._is_watching = [], True
        found: list[str] = []
        try:
            yield found
        finally:
            self._is_watching = False
            found += ["a file in the folder outside"] * self._any_event()
            found += self._paths

    def _any_event(self) -> bool:
        """Read all events; test if there was one."""
        seen = False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._events, 1 << 16):
                seen = True
        return seen


@contextlib.contextmanager
def limited_memory(n_bytes: int) -> Iterator[None]:
    """Let allocations in the block fail beyond ten times `n_bytes`, and 64 MiB."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + FREE_MEMORY + MEMORY_RATIO * n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
