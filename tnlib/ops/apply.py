"""A TT-matrix applied to a train or to another TT-matrix, compressed on the way."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from tnlib._fit import Fit, report
from tnlib._validate import as_max_rank, as_rtol
from tnlib.formats.train import TensorTrain, TTMatrix, as_column, refuse_unequal_legs
from tnlib.linalg.threads import own_threads
from tnlib.ops.convert import convert
from tnlib.ops.trains import as_train, put_together
from tnlib.sweeps.dense import fuse_row_and_column
from tnlib.sweeps.product import truncated_product
from tnlib.sweeps.scale import even_out

T = TypeVar("T", TensorTrain, TTMatrix)


@own_threads
def apply(operator: TTMatrix, x: T, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[T]:
    """Return operator @ x rounded: norm(operator @ x - fit.value) <= rtol * norm(operator @ x).

    The result is the one of `round(operator @ x)`, without the cores of the product: what is held beside it has no
    legs, and of that only every sqrt(d)-th bond.

    Parameters
    ----------
    operator
        A TTMatrix of bonds R.
    x
        A TensorTrain whose legs are the column legs of `operator`, or a TTMatrix whose row legs are; of bonds r. For a
        dense vector there is `operator @ x`.
    rtol
        Relative Frobenius error of the whole. Without it and `max_rank`: the numerical ranks.
    max_rank
        Cap on every bond; the smaller rank wins.

    Returns
    -------
    Fit
        Of the type of `x`, left-canonical as `round` leaves it. The cost per core is that of orthogonalising a matrix
        with R r rows and as many columns as its part on the right has rank, at most R r times the leg.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If the two are not trains, their legs do not meet, or a tolerance is off.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), section 4.3; E. M. Stoudenmire and
    S. R. White, "Minimally entangled typical thermal state algorithms", New J. Phys. 12 (2010), section 3.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> flip = tnlib.TTMatrix([np.array([[0.0, 1.0], [1.0, 0.0]]).reshape(1, 2, 2, 1)] * 50)
    >>> up = tnlib.TensorTrain([np.array([1.0, 0.0]).reshape(1, 2, 1)] * 50)
    >>> fit = tnlib.apply(flip + flip, up)
    >>> max(fit.value.ranks), f"{fit.value.norm():.3f}", float(tnlib.inner(up, fit.value))
    (1, '2.000', 0.0)
    """
    as_train("apply", "operator", operator, TTMatrix)
    as_train("apply", "x", x)
    rtol, max_rank = as_rtol("apply", rtol), as_max_rank("apply", max_rank)
    matrix = as_column(x) if isinstance(x, TensorTrain) else x
    refuse_unequal_legs("apply", operator, matrix)
    dtype = np.result_type(operator.dtype, matrix.dtype)
    (a, e, f), (b, g, h) = (even_out(t.cores, t.log_scale) for t in (operator, matrix))
    a, b = ([core.astype(dtype, copy=False) for core in cores] for cores in (a, b))
    cores, twos, budget = truncated_product(a, b, rtol, max_rank, dtype)
    value = put_together(TTMatrix(tuple(cores)), fuse_row_and_column(cores), len(cores) - 1, twos + e + g, f * h)
    cuts = ", ".join(str(k + 1) for k in budget.cuts)
    notes = (f"max_rank separates equal singular values at bond {cuts}; another rank would be unique",) if cuts else ()
    result: Any = convert(value, type(x))
    return report("apply", result, error=budget.error, rtol=rtol, notes=notes)
