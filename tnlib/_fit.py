"""Fit: the result of every decomposition and rounding, with its error and its report."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import numpy as np

from tnlib._errors import ArgumentTypeError, ConvergenceWarning, DegenerateCutWarning
from tnlib._html import bars, facts
from tnlib._typing import FormatProtocol
from tnlib._validate import advice_for

F = TypeVar("F", bound=FormatProtocol)


@dataclass(frozen=True, eq=False, repr=False)
class Fit(Generic[F]):
    """A decomposition with its error and the numbers that it stores.

    Parameters
    ----------
    value
        The format: `SVD`, `TensorTrain`, `TTMatrix`, `Tucker`, `CP`, ...
    error
        Relative Frobenius error, norm(x - value.full()) / norm(x); 0 for a zero tensor.
    certified
        True if `error` is never below the true error by more than roundoff. Subnormal results (below 2.2e-308, or
        1.2e-38 in single precision) are not certified, because their rounding errors are not relative.
    converged
        False if the tolerance was missed, or an iteration reached its maximal number of steps. With `max_rank` alone
        there is no tolerance to miss: True at any error.
    n_iter
        Number of sweeps; 0 for direct methods.
    notes
        Remarks that are printed with the report, such as a truncation that separates equal singular values.
    n_calls
        Evaluations of the function that was decomposed; None for arrays.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tnlib.tt_svd(np.ones((4, 5, 6)))
    Fit of TensorTrain, shape 4 x 5 x 6, float64
      ranks       1 1 1 1
      parameters  15 of 120, 8.0 times fewer
      error       roundoff, certified
    """

    value: F
    error: float
    certified: bool
    converged: bool
    n_iter: int
    notes: tuple[str, ...] = ()
    n_calls: int | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            where = "" if name.startswith("_") or not hasattr(self.value, name) else f"; use fit.value.{name}"
            raise AttributeError(f"'Fit' object has no attribute '{name}'{where}", name=name, obj=self)

    def _refuse_arithmetic(self, other: Any) -> NoReturn:
        raise ArgumentTypeError(
            f"Fit: operands must be formats, got a Fit of a {type(self.value).__name__}; use fit.value."
        )

    __add__ = __sub__ = __mul__ = __matmul__ = _refuse_arithmetic

    def _repr_html_(self) -> str:
        title, *lines = repr(self).splitlines()
        rows = dict(line.split(maxsplit=1) for line in lines[: len(lines) - len(self.notes)])
        rows |= {"notes": "; ".join(self.notes)} if self.notes else {}
        return facts(title, rows, bars(self.value.ranks, "ranks"))

    def __repr__(self) -> str:
        value = self.value
        dense, stored = math.prod(value.shape), value.n_parameters
        ratio = f"{_times(dense, stored)} times fewer" if dense > stored else f"{_times(stored, dense)} times more"
        error = f"{self.error:.3g}" if self.error > roundoff(value.dtype) else "roundoff"
        kind = "certified" if self.certified else "estimated"
        lines = [
            f"Fit of {type(value).__name__}, shape {shorten(value.shape, ' x ')}, {value.dtype}",
            f"  ranks       {shorten(value.ranks, ' ')}",
            f"  parameters  {stored:,} of {_count(dense)}, {ratio}",
            f"  error       {error}, {kind}" + ("" if self.converged else ", NOT converged"),
        ]
        if self.n_calls is not None:
            lines.append(f"  calls       {self.n_calls:,}")
        if self.n_iter:
            lines.append(f"  sweeps      {self.n_iter}")
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)


def roundoff(dtype: np.dtype[Any], n_steps: int = 1) -> float:
    """Return the relative error below which `n_steps` factorizations of a tensor count as exact."""
    return 32 * float(np.finfo(dtype).eps) * math.sqrt(n_steps)


def _count(n: int) -> str:
    """Return an integer, a long one by its order of magnitude.

    >>> _count(65_536), _count(2**1000)
    ('65,536', '1.1e+301')
    """
    if n < 10**15:
        return f"{n:,}"
    exponent = len(str(n)) - 1
    return f"{n // 10 ** (exponent - 3) / 1000:.1f}e+{exponent}"


def _times(large: int, small: int) -> str:
    return f"{large / small:.1f}" if large < 10**15 * small else _count(large // small)


def shorten(sizes: tuple[int, ...], separator: str) -> str:
    """Return a list of sizes, all of a short train, both ends of a long one.

    >>> shorten((2,) * 100, " ")
    '2 2 2 2 2 2 2 2 ... 2 2 2 2 (100 of them, largest 2)'
    """
    if len(sizes) <= 16:
        return separator.join(map(str, sizes))
    head, tail = (separator.join(map(str, part)) for part in (sizes[:8], sizes[-4:]))
    return f"{head} ... {tail} ({len(sizes)} of them, largest {max(sizes)})"


def format_html(value: FormatProtocol) -> str:
    """Return what notebooks show of a format: sizes, and the ranks as a picture."""
    rows = {
        "shape": shorten(value.shape, " x "),
        "ranks": shorten(value.ranks, ", "),
        "parameters": f"{value.n_parameters:,} of {_count(math.prod(value.shape))}",
        "dtype": str(value.dtype),
    }
    return facts(type(value).__name__, rows, bars(value.ranks, "ranks"))


def refuse_other_arrays(function: str, parameter: str, value: object) -> None:
    """Raise where `value` is a format with arrays of another library, which the function does not support."""
    library = getattr(value, "library", None)  # of a class it is a property
    if isinstance(library, str) and library != "numpy":
        raise ArgumentTypeError(
            f"{function}: {parameter} must hold numpy arrays, got {value!r}; convert it with .to_numpy()."
        )


def wrong_type(function: str, parameter: str, expected: str, value: object, advice: str) -> ArgumentTypeError:
    """Return the error of a parameter of another type than `expected` ("a TensorTrain"), with advice by its class."""
    refuse_other_arrays(function, parameter, value)
    advice = advice_for(value, advice)
    return ArgumentTypeError(f"{function}: {parameter} must be {expected}, got a {type(value).__name__}; {advice}.")


def report(
    function: str,
    value: F,
    *,
    error: float,
    rtol: float | None,
    n_iter: int = 0,
    notes: tuple[str, ...] = (),
    estimate: str | None = None,
) -> Fit[F]:
    """Return the `Fit` of `function`, and warn of a missed tolerance and of notes.

    `estimate` is the note on an error that is estimated, empty where there is nothing to add; None for an error that is
    known.
    """
    missed = rtol is not None and error > rtol and error > roundoff(value.dtype, len(value.ranks))
    if missed:
        text = (
            f"{function}: the error {error:.3g} misses rtol={rtol:.3g}; "
            "raise the rank or the number of sweeps that limits it, or rtol."
        )
        warnings.warn(text, ConvergenceWarning, stacklevel=5)
    for note in notes:
        warnings.warn(f"{function}: {note}", DegenerateCutWarning, stacklevel=5)
    certified = estimate is None
    if estimate:
        notes = (*notes, estimate)
    if certified and value.is_subnormal():
        certified, note = False, "the result has subnormal numbers, whose rounding the error leaves out; scale x up"
        notes = (*notes, note)
    return Fit(value, error, certified, not missed, n_iter, notes)


def after_sweeps(function: str, fit: Fit[F], *, rtol: float | None, stationary: bool) -> Fit[F]:
    """Return the `fit` of an iteration: not converged, with a warning, if it still improves and no `rtol` was given."""
    if rtol is not None or stationary:
        return fit
    text = f"{function}: still improving after {fit.n_iter} sweeps, at error {fit.error:.3g}; raise n_iter."
    warnings.warn(text, ConvergenceWarning, stacklevel=5)
    return replace(fit, converged=False)
