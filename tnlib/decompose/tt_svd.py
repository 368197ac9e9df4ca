"""Dense arrays to tensor trains and TT-matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_max_rank, as_rtol, as_sizes
from tnlib.decompose.prepare import prepare
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.linalg.scale import shift
from tnlib.linalg.threads import own_threads
from tnlib.ops.operator_schmidt import terms_to_matrix
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.dense import pair_legs
from tnlib.sweeps.split import dense_to_cores


@own_threads
def tt_svd(x: Any, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[TensorTrain]:
    """Decompose `x` into a train so that norm(x - fit.value.full()) <= rtol * norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), d >= 1, real or complex, 32 or 64 bits a component.
    rtol
        Relative Frobenius error of the whole. Without it and `max_rank`: the numerical ranks.
    max_rank
        Cap on every bond; the smaller rank wins.

    Returns
    -------
    Fit[TensorTrain]
        Left-canonical: the centre is the last core, every other one isometric from the right bond into its
        left bond and leg, with positive leading entries. At a given set of ranks the error is at most
        sqrt(d - 1) times the smallest possible one.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `x` is not a finite array of numbers, or a tolerance is off.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), Algorithm 1.

    Examples
    --------
    The sum of four indices has rank 2 on every bond.

    >>> import numpy as np, tnlib
    >>> i = np.arange(10.0)
    >>> x = i[:, None, None, None] + i[:, None, None] + i[:, None] + i
    >>> tnlib.tt_svd(x, rtol=1e-10).value.ranks
    (1, 2, 2, 2, 1)
    """
    rtol, max_rank = as_rtol("tt_svd", rtol), as_max_rank("tt_svd", max_rank)
    scaled, exponent, norm = prepare("tt_svd", "x", x)
    cores, budget = _train(scaled, exponent, norm, rtol, max_rank)
    value = TensorTrain(tuple(cores), center=len(cores) - 1)
    return report("tt_svd", value, error=budget.error, rtol=rtol, notes=_notes(budget))


@own_threads
def ttm_svd(
    a: Any,
    row_shape: Sequence[int],
    col_shape: Sequence[int],
    *,
    rtol: float | None = None,
    max_rank: int | None = None,
) -> Fit[TTMatrix]:
    """Decompose the matrix `a` into a TT-matrix so that norm(a - fit.value.full()) <= rtol * norm(a).

    Parameters
    ----------
    a
        (prod m, prod n), real or complex, 32 or 64 bits a component; or KroneckerTerms, of which the first legs must
        split the positions and the others the features: the matrix is then never multiplied out.
    row_shape, col_shape
        (m[0], ..., m[d-1]) and (n[0], ..., n[d-1]): how the rows and the columns split into legs, slowest first.
    rtol
        Relative Frobenius error of the whole. Without it and `max_rank`: the numerical ranks.
    max_rank
        Cap on every bond; the smaller rank wins.

    Returns
    -------
    Fit[TTMatrix]
        Left-canonical over the paired legs (m[k], n[k]); the centre is the last core.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `a` is not a finite matrix, the legs do not multiply to its shape, or a tolerance is off.

    References
    ----------
    I. V. Oseledets, "Approximation of 2^d x 2^d matrices using tensor decomposition", SIAM J. Matrix Anal.
    Appl. 31 (2010).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = np.kron(np.eye(4), np.ones((8, 2)))
    >>> tnlib.ttm_svd(a, (4, 8), (4, 2)).value.ranks
    (1, 1, 1)
    """
    rtol, max_rank = as_rtol("ttm_svd", rtol), as_max_rank("ttm_svd", max_rank)
    if isinstance(a, KroneckerTerms):
        rows, columns = _as_pairs(row_shape, col_shape, a.shape)
        held, budget = terms_to_matrix(a, rows, columns, _behind_positions(a, rows, columns), rtol, max_rank)
        return report("ttm_svd", held, error=budget.error, rtol=rtol, notes=_notes(budget))
    matrix, exponent, norm = prepare("ttm_svd", "a", a, ndim=2)
    rows, columns = _as_pairs(row_shape, col_shape, matrix.shape)
    paired = np.ascontiguousarray(pair_legs(matrix, rows, columns))
    cores, budget = _train(paired, exponent, norm, rtol, max_rank)
    split = [
        core.reshape(len(core), m, n, -1)  # l m n r
        for core, m, n in zip(cores, rows, columns, strict=True)
    ]
    value = TTMatrix(tuple(split), center=len(split) - 1)
    return report("ttm_svd", value, error=budget.error, rtol=rtol, notes=_notes(budget))


def _as_pairs(row_shape: Any, col_shape: Any, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = as_sizes("ttm_svd", "row_shape", row_shape, total=shape[0])
    columns = as_sizes("ttm_svd", "col_shape", col_shape, total=shape[1])
    if len(rows) != len(columns):
        raise ArgumentError(
            f"ttm_svd: row_shape and col_shape must have as many legs as each other, got {rows} and {columns}; "
            "add legs of size 1."
        )
    return rows, columns


def _behind_positions(a: KroneckerTerms, rows: Sequence[int], columns: Sequence[int]) -> int:
    """Return how many legs split the positions; all others split the features."""
    positions = a.left.shape[1:]
    for k in range(1, len(rows)):
        if (math.prod(rows[:k]), math.prod(columns[:k])) == positions:
            return k
    raise ArgumentError(
        "ttm_svd: row_shape and col_shape must split the positions of KroneckerTerms before the features, and begin "
        f"with legs that multiply to {positions[0]} and {positions[1]}, got {tuple(rows)} and {tuple(columns)}; "
        "no leg may hold part of both."
    )


def _train(
    x: Array, exponent: int, norm: float, rtol: float | None, max_rank: int | None
) -> tuple[list[Array], Budget]:
    """Sweep, and give the power of two that was set aside back to the centre."""
    sides = [min(math.prod(x.shape[:k]), math.prod(x.shape[k:])) for k in range(1, x.ndim)]
    budget = Budget(norm, rtol, sides, x.dtype)
    *isometries, center = dense_to_cores(x, budget, max_rank)
    return [*isometries, shift(center, exponent)], budget


def _notes(budget: Budget) -> tuple[str, ...]:
    if not budget.cuts:
        return ()
    bonds = ", ".join(str(k + 1) for k in budget.cuts)
    return (f"max_rank separates equal singular values at bond {bonds}; another rank would be unique",)
