"""Errors of several tensor formats of one array at equal numbers of parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

import tnlib
from tnlib import ArgumentError, ArgumentTypeError, ConvergenceWarning, DegenerateCutWarning
from tnlib._typing import Array
from tnlib._validate import as_array, as_flag, is_list, is_one_of
from tnlib_adapters.checkpoints.weight_stacks import View
from tnlib_adapters.result_table import Columns, Table

_STEPS = 24  # bisection steps of the logarithm of the tolerance: relative accuracy 1e-6
_SWEEPS = 20  # of alternating least squares


@dataclass(frozen=True)
class FormatRow:
    """One format at the largest size within the limit; `value` is None if rank 1 exceeds it.

    `random_error` is that of the format for a random array at the same limit, or None.
    """

    format: str
    ranks: tuple[int, ...]
    n_parameters: int
    error: float
    value: Any
    random_error: float | None = None


@dataclass(frozen=True, repr=False)
class FormatTable(Table):
    """Formats of one array, best first."""

    title: str  # description of the array
    limit: int  # maximum number of parameters
    rows: tuple[FormatRow, ...]  # ranks, number of parameters and relative Frobenius error of each format

    _FORMATS: ClassVar = {"error": ".4f", "random_error": ".4f"}

    def __getitem__(self, name: str) -> FormatRow:
        return {row.format: row for row in self.rows}[name]

    @property
    def _title(self) -> str:
        return f"{self.title}, at most {self.limit:,} parameters"

    def _columns(self, rows: Any) -> Columns:
        chosen = self.rows[rows]
        ranks = [" ".join(map(str, r.ranks)) if r.value is not None else "exceeds the limit at rank 1" for r in chosen]
        has_random = any(row.random_error is not None for row in self.rows)
        return {
            "format": [row.format for row in chosen],
            "parameters": [row.n_parameters for row in chosen],
            "error": [row.error for row in chosen],
            **({"random_error": [row.random_error for row in chosen]} if has_random else {}),
            "ranks": ranks,
        }


def compare_formats(
    view: View | Array,
    *,
    keep: float,
    formats: Sequence[str] = ("svd", "tensor train", "tucker", "cp"),
    pairs: tuple[Sequence[int], Sequence[int]] | None = None,
    beside_random: bool = False,
) -> FormatTable:
    """Decompose an array in several formats at equal numbers of parameters.

    Tensor trains and Tucker use the smallest tolerance within the limit, "svd" the best bipartition of the legs in
    order, CP the largest rank, by alternating least squares, which takes longest for large arrays.

    Parameters
    ----------
    view
        An array, or a `View` with at least two legs.
    keep
        Number of parameters as a fraction of the size of the array, in (0, 1].
    formats
        Any of "svd", "tensor train", "tucker" and "cp".
    pairs
        Sizes of the row legs and of the column legs of a matrix; adds a TT-matrix to the table.
    beside_random
        Whether the table has the errors of a random array too (`random_error`). Each of its matrices, over the last two
        legs, has the singular values of that of the array, and random singular vectors (seed 0): a format whose error
        is no smaller than this one finds nothing that the matrices have in common.

    Returns
    -------
    FormatTable
        Printed as a table, sorted by error.

    Raises
    ------
    ArgumentError
        If a format is unknown, `keep` is outside (0, 1], or the array has fewer than two legs.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.checkpoints import weight_stacks as stacks
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> view = stacks.projections(layer)
    >>> table = compare_formats(view, keep=0.25, formats=("svd", "tucker"))
    >>> table.limit, all(row.n_parameters <= 4096 for row in table.rows)
    (4096, True)
    """
    x = as_array("compare_formats", "view", view)
    if x.ndim < 2:
        raise ArgumentError(
            f"compare_formats: view must have at least two legs, got shape {x.shape}; split it into finer legs."
        )
    if not isinstance(keep, int | float | np.number) or isinstance(keep, bool):
        raise ArgumentTypeError(f"compare_formats: keep must be a number, got {keep!r}; pass for example keep=0.25.")
    if not 0 < keep <= 1:
        raise ArgumentError(f"compare_formats: keep must lie in (0, 1], got {keep}; it is a share of the parameters.")
    for name in formats if is_list(formats) else (formats,):
        if not is_one_of(name, _FORMATS):
            known = ", ".join(map(repr, _FORMATS))
            raise ArgumentError(f"compare_formats: formats must be among {known}, got {name!r}; choose from them.")
    if pairs is not None and (not is_list(pairs) or len(pairs) != 2):
        raise ArgumentTypeError(
            f"compare_formats: pairs must be the sizes of the row legs and of the column legs, got {pairs!r:.80}; "
            "pass for example pairs=((2, 3), (4, 4))."
        )
    limit = int(keep * x.size)
    rows = _rows(x, limit, formats, pairs)
    if as_flag("compare_formats", "beside_random", beside_random):
        errors = [row.error for row in _rows(_with_random_vectors(x), limit, formats, pairs)]
        rows = [replace(row, random_error=error) for row, error in zip(rows, errors, strict=True)]
    title = repr(view)[5:-1] if isinstance(view, View) else " x ".join(map(str, x.shape))
    return FormatTable(title, limit, tuple(sorted(rows, key=lambda row: row.error)))


def _rows(
    x: Array, limit: int, formats: Sequence[str], pairs: tuple[Sequence[int], Sequence[int]] | None
) -> list[FormatRow]:
    with warnings.catch_warnings():
        # the table states the error, and the position of a cut in a spectrum does not matter
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateCutWarning)
        rows = [_FORMATS[name](name, x, limit) for name in formats]
        if pairs is not None:
            rows.append(_by_tolerance("TT-matrix", tnlib.ttm_svd(x, *pairs).value, limit))
    return rows


def _with_random_vectors(x: Array) -> Array:
    """Return an array whose matrices (..., m, n) have the singular values of those of x and random singular vectors."""
    rng, values = np.random.default_rng(0), np.linalg.svd(x, compute_uv=False)
    normal = (rng.standard_normal((*x.shape[:-2], size, values.shape[-1])) for size in x.shape[-2:])
    (u, a), (v, b) = (np.linalg.qr(matrices) for matrices in normal)
    signs = np.sign(np.diagonal(a * b, axis1=-2, axis2=-1))  # of columns: uniform over all rotations
    return np.asarray((u * (values * signs)[..., None, :]) @ v.swapaxes(-2, -1), dtype=values.dtype)  # ... m [k] n


def _by_tolerance(name: str, exact: Any, limit: int) -> FormatRow:
    """Return the format at the smallest tolerance within the limit, by bisection."""
    if exact.n_parameters <= limit:
        return _row(name, tnlib.round(exact), limit)
    low, high = math.log(np.finfo(exact.dtype).eps), 0.0
    best = tnlib.round(exact, rtol=1.0)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fit = tnlib.round(exact, rtol=math.exp(middle))
        if fit.value.n_parameters <= limit:
            high, best = middle, fit
        else:
            low = middle
    return _row(name, best, limit)


def _cut_in_two(name: str, x: Array, limit: int) -> FormatRow:
    rows = []
    for left in range(1, x.ndim):
        m = math.prod(x.shape[:left])
        fit = tnlib.svd(x, left=tuple(range(left)), max_rank=max(1, limit // (m + x.size // m + 1)))
        rows.append(_row(name, fit, limit))
    return min(rows, key=lambda row: row.error)


def _cp(name: str, x: Array, limit: int) -> FormatRow:
    rank = limit // (sum(x.shape) + 1)
    return _row(name, tnlib.cp(x, max(1, rank), n_iter=_SWEEPS), limit)


def _row(name: str, fit: Any, limit: int) -> FormatRow:
    value = fit.value
    if value.n_parameters > limit:
        return FormatRow(name, value.ranks, value.n_parameters, 1.0, None)
    return FormatRow(name, value.ranks, value.n_parameters, fit.error, value)


_FORMATS: dict[str, Callable[[str, Array, int], FormatRow]] = {
    "svd": _cut_in_two,
    "tensor train": lambda name, x, limit: _by_tolerance(name, tnlib.tt_svd(x).value, limit),
    "tucker": lambda name, x, limit: _by_tolerance(name, tnlib.tucker(x).value, limit),
    "cp": _cp,
}
