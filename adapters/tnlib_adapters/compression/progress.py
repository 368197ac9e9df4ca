"""Progress callbacks of long work, and their display: bars on a terminal, otherwise lines of a log.

Both show the time left and the memory.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Self, TextIO, cast

from tnlib_adapters.files.process_memory import resident_memory

Progress = Callable[[str, int, int], None]  # (stage, done, total)


class Stage(str):
    """Name of a stage of long work, equal for all its steps, with the current part as `detail`, "" for none.

    Examples
    --------
    >>> stage = Stage("collecting statistics", "block 7 of 22")
    >>> stage == "collecting statistics", stage.detail
    (True, 'block 7 of 22')
    """

    detail: str

    def __new__(cls, name: str, detail: str = "") -> Self:
        """Return the string with its attribute."""
        stage = super().__new__(cls, name)
        stage.detail = detail
        return stage


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress."""


_COLUMNS = 64  # of a line without its bar
_SILENT = 20.0  # seconds after which a log has a line of a part that has one already


@dataclass
class State:
    """Progress of one stage."""

    # time of the first call, and the steps that were done then: those of an interrupted run are not counted
    began: float
    first: int
    last: float = 0.0  # time of the last call, and its steps
    done: int = 0
    total: int = 0
    part: str = ""  # what is being done
    memory: int = 0  # resident memory at the last call, in bytes

    def update(self, stage: str, done: int, total: int, now: float) -> None:
        """Take over a call; a stage that starts again, of the next text or model, is timed anew."""
        if done < self.done:
            self.began, self.first = now, done
        self.last, self.done, self.total = now, done, total
        detail = getattr(stage, "detail", "")
        self.part = detail if detail and done < total else f"{done}/{total}"
        self.memory = resident_memory()

    def time(self, now: float) -> str:
        """Return the time left, as the mean time of a step so far predicts it; of a finished stage the time it took."""
        if self.done >= self.total:
            return _clock(self.last - self.began)
        steps = self.done - self.first
        if steps == 0:
            return "-:--:-- left"
        left = (self.last - self.began) / steps * (self.total - self.done) - (now - self.last)
        return f"{_clock(max(0.0, left))} left"


def _clock(seconds: float) -> str:
    """Return hours, minutes and seconds.

    >>> _clock(4000)
    '1:06:40'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextlib.contextmanager
def progress_bars(check: Callable[[], None]) -> Iterator[Progress]:
    """Yield a function that calls `check` and shows (stage, done, total) on standard error.

    Without a terminal it is a line for every part of a stage, such as a block, and at least every 20 seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Cell(ProgressColumn):
        """Text that is computed from the state of a stage at every refresh."""

        def __init__(self, of: Callable[[State], str], width: int) -> None:
            super().__init__()
            self._of, self._width = of, width

        def render(self, task: Task) -> Text:
            return Text(f"{self._of(task.fields['state']):>{self._width}}", no_wrap=True)

    console = Console(file=cast(TextIO, _Display(sys.stderr or io.StringIO())))
    if not console.is_terminal:
        yield _Log(check, console.file)
        return
    bars = Bars(
        TextColumn("{task.description:<21}"),
        BarColumn(bar_width=max(4, min(40, console.width - _COLUMNS))),
        Cell(lambda state: state.part, 14),
        Cell(lambda state: state.time(time.monotonic()), 12),
        Cell(lambda state: f"{state.memory / 1e9:.1f} GB", 7),
        console=console,
        transient=True,
    )
    tasks: dict[str, Any] = {}
    states: dict[str, State] = {}

    def show(stage: str, done: int, total: int) -> None:
        check()
        bars.start()  # not earlier: an error before the first step is printed without an empty line
        name = str(stage)
        state = states.setdefault(name, State(time.monotonic(), done))
        state.update(stage, done, total, time.monotonic())
        if name not in tasks:  # shown at once
            tasks[name] = bars.add_task(name, total=total, state=state)
        bars.update(tasks[name], completed=done, total=total)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()


class _Log:
    """Progress as lines: time since the start, stage, part, time left and memory."""

    def __init__(self, check: Callable[[], None], file: IO[str]) -> None:
        self._check, self._file, self._started = check, file, time.monotonic()
        self._states: dict[str, State] = {}
        self._shown, self._at = ("", ""), -_SILENT

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._check()
        name, now = str(stage), time.monotonic()
        state = self._states.setdefault(name, State(now, done))
        state.update(stage, done, total, now)
        part = name, getattr(stage, "detail", "") if done < total else "done"
        if part == self._shown and now - self._at < _SILENT:
            return
        self._shown, self._at = part, now
        cells = (_clock(now - self._started), f"{name:<21}", f"{state.part:<14}", state.time(now))
        print("  ".join((*cells, f"{state.memory / 1e9:.1f} GB")), file=self._file, flush=True)


class _Display:
    """A stream whose failures to write are ignored: standard error may be full, or closed, and the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
