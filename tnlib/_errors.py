"""Errors and warnings; every message names function, parameter, expected and actual value, and a remedy."""

from __future__ import annotations


class TnlibError(Exception):
    """Base class of the errors that tnlib raises; the message is one line, whatever it quotes."""

    def __init__(self, message: str = "") -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


class ArgumentError(TnlibError, ValueError):
    """An argument has the right type and an invalid value."""


class ArgumentTypeError(TnlibError, TypeError):
    """An argument has a type that the function cannot use."""


class FileFormatError(TnlibError, ValueError):
    """A file or folder has the wrong format."""


class MissingFileError(FileFormatError, FileNotFoundError):
    """A file or folder does not exist."""

    __str__ = Exception.__str__  # OSError would look for an errno


class ConvergenceWarning(UserWarning):
    """The result misses its tolerance; its `Fit.converged` is False."""


class DegenerateCutWarning(UserWarning):
    """A rank cap separates singular values that are equal to roundoff, so the kept subspace is arbitrary."""
