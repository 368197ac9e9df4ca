"""The errors and warnings of tnlib: every one says function, parameter, expected, got and what to do."""

from __future__ import annotations


class TnlibError(Exception):
    """Base of everything that tnlib raises on purpose; its message is one line, whatever it quotes."""

    def __init__(self, message: str = "") -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


class ArgumentError(TnlibError, ValueError):
    """An argument has the right type and an impossible value."""


class ArgumentTypeError(TnlibError, TypeError):
    """An argument has a type that the function cannot use."""


class FileFormatError(TnlibError, ValueError):
    """A file or folder is not what it should be."""


class MissingFileError(FileFormatError, FileNotFoundError):
    """A file or folder that must be there is not."""

    __str__ = Exception.__str__  # OSError would look for an errno


class ConvergenceWarning(UserWarning):
    """The result misses the tolerance that was asked for; its `Fit.converged` is False."""


class DegenerateCutWarning(UserWarning):
    """A rank cap separates singular values that are equal to roundoff, so the kept subspace is arbitrary."""
