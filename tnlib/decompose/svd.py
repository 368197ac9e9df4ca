"""Truncated singular value decomposition of a matrix, or of a tensor split into two groups of legs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tnlib._errors import ArgumentError
from tnlib._fit import Fit, report
from tnlib._validate import as_legs, as_max_rank, as_rtol
from tnlib.decompose.prepare import prepare
from tnlib.formats.svd import SVD
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.randomized import leading_svd
from tnlib.linalg.scale import shift
from tnlib.linalg.svd import thin_svd
from tnlib.linalg.threads import own_threads
from tnlib.sweeps.budget import Budget

_SETTLED = 1e-4  # relative difference of singular values that an iteration tells apart


@own_threads
def svd(
    a: Any,
    *,
    left: int | Sequence[int] | None = None,
    rtol: float | None = None,
    max_rank: int | None = None,
) -> Fit[SVD]:
    """Decompose `a` so that norm(a - fit.value.full()) <= rtol * norm(a), with the smallest rank.

    Parameters
    ----------
    a
        (m, n), or any number of legs if `left` is given; real or complex, 32 or 64 bits a component.
    left
        Legs that form the rows; the others, in order, form the columns.
    rtol
        Relative Frobenius error of the whole. Without it and `max_rank`: the numerical rank.
    max_rank
        Cap on the rank; the smaller rank wins.

    Returns
    -------
    Fit[SVD]
        `u` with orthonormal columns whose leading entries are positive, `s` descending, `vh` with orthonormal
        rows. No other decomposition of that rank has a smaller error (Eckart and Young, 1936); of a large matrix,
        with `max_rank` alone and small, one may have, as a rule by less than a part in a thousand.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `a` is not a finite array of numbers, `left` does not name some of its legs, or a tolerance is off.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> fit = tnlib.svd(np.diag([4.0, 3.0, 0.0]), max_rank=1)
    >>> fit.value.s, fit.error
    (array([4.]), 0.6)
    """
    rtol, max_rank = as_rtol("svd", rtol), as_max_rank("svd", max_rank)
    x, exponent, norm = prepare("svd", "a", a)
    if left is None and x.ndim != 2:
        raise ArgumentError(
            f"svd: a must be a matrix unless left= names the legs that form its rows, got shape {x.shape}; pass left."
        )
    rows = (0,) if left is None else as_legs("svd", "left", left, x.ndim)
    columns = [k for k in range(x.ndim) if k not in rows]
    row_shape, column_shape = [x.shape[k] for k in rows], [x.shape[k] for k in columns]

    matrix = x.transpose(*rows, *columns).reshape(math.prod(row_shape), -1)
    budget = Budget(norm, rtol, [min(matrix.shape)], matrix.dtype)
    found = None
    if max_rank is not None and rtol is None:  # with a tolerance the smallest rank is asked for
        found = leading_svd(matrix, max_rank, norm=norm, negligible=budget.negligible)
    if found is None:
        u, s, vh = thin_svd(matrix)
        rank = budget.choose(s, max_rank=max_rank)
    else:
        u, s, vh, lost = found
        rank = budget.choose(s, max_rank=max_rank, beyond=lost, apart=_SETTLED)
    u, vh = u[:, :rank].astype(budget.dtype, copy=False), vh[:rank].astype(budget.dtype, copy=False)
    s = s[:rank].astype(matrix.real.dtype, copy=False)
    turn = fixing_turn(u, s, u.dtype, diagonal=True)
    value = SVD(
        turn.columns(u).reshape(*row_shape, -1),
        shift(s, exponent),
        turn.rows(vh).reshape(-1, *column_shape),
        rows,
    )
    notes = ("max_rank separates equal singular values; another rank would be unique",) if budget.cuts else ()
    return report("svd", value, error=budget.error, rtol=rtol, notes=notes)
