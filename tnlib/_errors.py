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

    Examples
    --------
    >>> import tnlib
    >>> for shape in ((4, 4), (4, 5)):
    ...     try:
    ...         print(tnlib.inner(tnlib.ones((4, 4)), tnlib.ones(shape)))
    ...     except tnlib.TnlibError as error:
    ...         print(error)
    16.0
    inner: leg 1 must have one size, got 4 and 5; legs are not broadcast.
    """

    def __init__(self, message: str = "") -> None:
        line = " ".join(line.strip() for line in message.splitlines())
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST - 305]} ... {line[-300:]}"
        super().__init__(line)
        self.args = (line,)  # OSError takes those of __new__


class ArgumentError(TnlibError, ValueError):
    """An argument has the right type and an invalid value.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> try:
    ...     tnlib.svd(np.eye(3), max_rank=0)
    ... except tnlib.ArgumentError as error:  # or ValueError
    ...     print(error)
    svd: max_rank must be at least 1, got 0; raise it.
    """


class ArgumentTypeError(TnlibError, TypeError):
    """An argument has a type that the function cannot use.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> try:
    ...     tnlib.tt_svd(np.eye(3), max_rank=2.5)
    ... except tnlib.ArgumentTypeError as error:  # or TypeError
    ...     print(error)
    tt_svd: max_rank must be an integer, got 2.5; pass for example max_rank=8.
    """


class FileFormatError(TnlibError, ValueError):
    """A file or folder has the wrong format.

    Examples
    --------
    >>> import pathlib, tempfile, tnlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "layer-3.safetensors")
    >>> tnlib.save(path, tnlib.ones((8, 8, 8)))
    >>> _ = path.write_bytes(path.read_bytes()[:100])
    >>> try:
    ...     tnlib.load(path)
    ... except tnlib.FileFormatError as error:
    ...     print(error)
    load: ...layer-3.safetensors is not a whole safetensors file ..., save it again.
    """


class MissingFileError(FileFormatError, FileNotFoundError):
    """A file or folder does not exist.

    Examples
    --------
    >>> import tnlib
    >>> try:
    ...     tnlib.load("layer-3.safetensors")
    ... except tnlib.MissingFileError as error:  # or FileNotFoundError
    ...     print(error)
    load: path must be a file written by tnlib.save, found none at layer-3.safetensors.
    """

    __str__ = Exception.__str__  # OSError would look for an errno

    def __new__(cls, *args: Any) -> Self:
        """Return the error; that of ValueError would be found first, by libraries that call it to unpickle."""
        return OSError.__new__(cls, *args)


class ClusterError(TnlibError, RuntimeError):
    """The workers of a computation are lost.

    Examples
    --------
    Retry with fewer workers; this computation has memory for two:

    >>> import tnlib
    >>> def computed_by(workers):
    ...     if workers > 2:
    ...         raise tnlib.ClusterError(
    ...             "workers must stay until the end, got the loss of one; pass fewer."
    ...         )
    ...     return f"computed by {workers} workers"
    >>> try:
    ...     print(computed_by(8))
    ... except tnlib.ClusterError:
    ...     print(computed_by(2))
    computed by 2 workers
    """


class ConvergenceWarning(UserWarning):
    """The result misses its tolerance; its `Fit.converged` is False.

    Examples
    --------
    >>> import warnings, numpy as np, tnlib
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     fit = tnlib.svd(np.diag([4.0, 3.0]), rtol=0.1, max_rank=1)
    >>> f"{fit.error:.6f}", fit.converged
    ('0.600000', False)
    >>> print(caught[0].message)
    svd: the error 0.6 misses rtol=0.1; raise the rank or the number of sweeps that limits it, or rtol.
    """


class DegenerateCutWarning(UserWarning):
    """`max_rank` separates singular values that are equal to roundoff, so the kept subspace is not unique.

    Examples
    --------
    >>> import warnings, numpy as np, tnlib
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     fit = tnlib.svd(np.diag([2.0, 1.0, 1.0]), max_rank=2)
    >>> print(fit.value.ranks, caught[0].message)
    (2,) svd: max_rank separates equal singular values; another rank would be unique
    """
