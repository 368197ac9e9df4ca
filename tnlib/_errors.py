"""Errors and warnings; every message names function, parameter, expected and actual value, and a remedy."""

from __future__ import annotations

from typing import Any, Self

_LONGEST = 1000  # characters of a message


def in_one_line(problem: Exception) -> str:
    """Return the class and the text of an exception of another library, as one line for a message."""
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:300]


class TnlibError(Exception):
    """Base class of the errors that tnlib raises; messages have one line of at most 1,000 characters.

    Long quotations in a message are abbreviated in the middle; the remedy at the end is kept.
    """

    def __init__(self, message: str = "") -> None:
        line = " ".join(line.strip() for line in message.splitlines())
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST - 305]} ... {line[-300:]}"
        super().__init__(line)
        self.args = (line,)  # OSError takes those of __new__


class ArgumentError(TnlibError, ValueError):
    """An argument has the right type and an invalid value."""


class ArgumentTypeError(TnlibError, TypeError):
    """An argument has a type that the function cannot use."""


class FileFormatError(TnlibError, ValueError):
    """A file or folder has the wrong format."""


class MissingFileError(FileFormatError, FileNotFoundError):
    """A file or folder does not exist."""

    __str__ = Exception.__str__  # OSError would look for an errno

    def __new__(cls, *args: Any) -> Self:
        """Return the error; that of ValueError would be found first, by libraries that call it to unpickle."""
        return OSError.__new__(cls, *args)


class ClusterError(TnlibError, RuntimeError):
    """The workers of a computation are lost."""


class ConvergenceWarning(UserWarning):
    """The result misses its tolerance; its `Fit.converged` is False."""


class DegenerateCutWarning(UserWarning):
    """`max_rank` separates singular values that are equal to roundoff, so the kept subspace is not unique."""
