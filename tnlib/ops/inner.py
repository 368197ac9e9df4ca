"""Inner products and distances of formats, without dense arrays.

Two formats of different classes are converted to trains first. The cost is linear in the number of cores, a thousand of
which neither overflow nor underflow on the way.
"""

from __future__ import annotations

from typing import Any

from tnlib._array_api import reshape
from tnlib._errors import ArgumentError
from tnlib._format import LinearFormat, refuse_different_legs, refuse_mixed_libraries
from tnlib._registry import require
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.operations import inner_between
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.linalg.scaling import shift_in_range
from tnlib.linalg.threads import single_threaded_blas
from tnlib.ops.convert import convert


@single_threaded_blas
def inner(a: LinearFormat, b: LinearFormat, operator: TTMatrix | None = None) -> float | complex:
    """Return the sum over all entries of conj(a) times b, or times operator @ b, as a Python number.

    For formats with arrays of another library, return a 0-dimensional array of that library.

    Parameters
    ----------
    a, b
        TensorTrain, TTMatrix, Tucker, CP, LowRank or KroneckerTerms, with the same legs. If their classes differ, both
        are converted to trains.
    operator
        A TTMatrix, for TensorTrains or TTMatrices `a` and `b`. The product operator @ b is never formed.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> plus = tnlib.TensorTrain([np.full((1, 2, 1), 2**-0.5)] * 200)
    >>> flip = tnlib.TTMatrix([np.array([[0.0, 1.0], [1.0, 0.0]]).reshape(1, 2, 2, 1)] * 200)
    >>> f"{tnlib.inner(plus, plus, flip):.6f}"
    '1.000000'
    """
    if operator is None:
        a, b = _of_one_class("inner", a, b)
        product = require("inner", "inner", "a", a, "")(a, b)
        if a.library != "numpy":
            x = shift_in_range(
                product.array, product.exponent, "inner: the result", "lower the log_scale, or scale one down"
            )
            return reshape(x, ())  # type: ignore[no-any-return]
    else:
        product = inner_between(a, operator, b)
    try:
        return product.item()  # type: ignore[no-any-return]
    except OverflowError:
        raise ArgumentError(
            "inner: the result must lie below 1.8e308, got one beyond; lower the log_scale of one of the two."
        ) from None


@single_threaded_blas
def distance(a: LinearFormat, b: LinearFormat) -> float:
    """Return norm(a - b), accurate to roundoff of the norms of `a` and `b`, without cancellation of squares.

    It is computed from triangular factors of the difference; `a` and `b` are as for `inner`.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.TensorTrain([np.ones((1, 2, 1))] * 10)
    >>> f"{tnlib.distance(a, (1 + 1e-12) * a) / a.norm():.0e}"
    '1e-12'
    """
    a, b = _of_one_class("distance", a, b)
    difference = a - b
    try:
        return difference.norm()
    except ArgumentError:
        raise ArgumentError(
            "distance: the result must lie below 1.8e308, got one beyond; lower the log_scale of both."
        ) from None


def _of_one_class(function: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Return `a` and `b` as formats of one class, with the same legs."""
    for name, value in (("a", a), ("b", b)):
        require(function, "inner", name, value, "decompose or convert it first")
    refuse_mixed_libraries(function, a=a, b=b)
    if type(a) is not type(b):
        kind = TTMatrix if TTMatrix in (type(a), type(b)) else TensorTrain
        a, b = convert(a, kind), convert(b, kind)
    refuse_different_legs(function, a, b)
    return a, b
