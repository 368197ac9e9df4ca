"""Progress bars, errors as sentences, signals and refused outputs of every command."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, Self, TextIO

import click

if TYPE_CHECKING:
    from tnlib_adapters.compression.progress import Progress

OUTPUT_REFUSED = 3  # exit status


@contextlib.contextmanager
def command() -> Iterator[Progress]:
    """Yield the progress callback; errors become one sentence, and signals unwind the stack."""
    with _errors(), _Signals() as signals, _progress(signals.check) as progress:
        yield progress


@contextlib.contextmanager
def output() -> Iterator[None]:
    """Escape characters that the encodings of both outputs lack, and report a standard output that is refused."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except OSError as problem:  # of printing: commands turn their own into status 2
        _discard(sys.stdout)
        _refuse(
            f"standard output cannot be written to ({problem.strerror or problem}); the files that the command wrote "
            "are complete.",
            OUTPUT_REFUSED,
        )
    finally:
        for stream, errors in zip(streams, before, strict=True):
            with contextlib.suppress(OSError, ValueError):  # full, or closed
                stream.reconfigure(errors=errors)


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere: Python would write it again at its end, and complain."""
    with contextlib.suppress(OSError, ValueError):  # no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _Signals:
    """Raise exceptions on SIGINT, SIGTERM and SIGHUP, so that the stack unwinds."""

    def __init__(self) -> None:
        # handlers other than the defaults, of nohup or of a calling program, are not replaced
        defaults = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
        handlers = {getattr(signal, name): handler for name, handler in defaults.items() if hasattr(signal, name)}
        self._replaced = {
            number: default for number, default in handlers.items() if signal.getsignal(number) == default
        }
        self._received: list[int] = []

    def __enter__(self) -> Self:
        for number in self._replaced:
            signal.signal(number, self._end)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        if kind is not None:  # a library being loaded may have replaced the exception by an ImportError
            self.check()

    def check(self) -> None:
        """Raise again if a library has caught the exception."""
        if self._received:
            raise _end_by(self._received[0]) from None

    def _end(self, number: int, _frame: object) -> None:
        self._received.append(number)
        raise _end_by(number)


def _end_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn errors that the user can fix into one sentence and exit status 2."""
    from tnlib import TnlibError

    try:
        yield
    except (TnlibError, ModuleNotFoundError) as problem:  # the message names the optional package
        # the command in place of the function that raised it: `plan` refuses what `compress` refuses
        _refuse(re.sub(r"^\w+(?=: )", str(click.get_current_context().info_name), str(problem)))
    except OSError as problem:
        reason = f"{problem.strerror or problem}" + (f": {problem.filename}" if problem.filename else "")
        _refuse(f"the system refused a file, nothing was written ({reason}).")


def _refuse(sentence: str, status: int = 2) -> NoReturn:
    try:
        click.echo(f"Error: {sentence}", err=True)
    except OSError:  # standard error cannot be written to: the status remains
        _discard(sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def _progress(check: Callable[[], None]) -> Iterator[Progress]:
    """Yield a function that calls `check` and shows (stage, done, total) as a bar on standard error."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # bars of transformers would overwrite ours
    from tnlib_adapters.compression.progress import progress_bars

    with progress_bars(check) as show:
        yield show
