"""Progress of the passes over an array, for programs that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

Observer: TypeAlias = Callable[[str, int, int], None]  # stage, tiles done, tiles in total

_OBSERVER: ContextVar[Observer | None] = ContextVar("tnlib.out_of_core.progress", default=None)


@contextmanager
def observed_passes(observer: Observer) -> Iterator[None]:
    """Call `observer` after every tile that decompositions read inside the block."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def notify(stage: str, done: int, total: int) -> None:
    """Call the observer, if there is one."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer(stage, done, total)
