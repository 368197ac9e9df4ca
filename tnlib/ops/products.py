"""Inner products, distances, Kronecker and outer products of formats, without dense arrays.

Inner products of two formats of different classes convert them to trains first. Their cost is linear in the number of
cores, a thousand of which neither overflow nor underflow on the way.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

from tnlib._array_api import reshape
from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import refuse_other_arrays
from tnlib._format import Format, LinearFormat, refuse_different_legs, refuse_mixed_libraries
from tnlib._registry import implementation, list_formats, require
from tnlib._validate import advice_for, plural
from tnlib.formats.matrix.low_rank import LowRank
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
    >>> flip = tnlib.TTMatrix([np.array([[0, 1.0], [1.0, 0]]).reshape(1, 2, 2, 1)] * 200)
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
    refuse_other_arrays("distance", "a", a)  # whose norms cancel
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


F = TypeVar("F", bound=Format)


def kron(a: F, b: F) -> F:
    """Return the Kronecker product of two formats, numpy.kron of their dense arrays.

    Both have the same class and the same number of legs, and so has the result. Leg k has size a.shape[k] * b.shape[k],
    and ranks multiply. For TTMatrices, the cores of `a` precede those of `b`. The outer product of two tensors, with
    the legs of both, is `tnlib.outer`.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.LowRank(np.ones((2, 1)), np.ones((1, 3)))
    >>> tnlib.kron(a, a).shape
    (4, 9)
    """
    return _combine("kron", a, b)  # type: ignore[no-any-return]


@overload
def outer(a: LowRank, b: LowRank) -> TensorTrain: ...
@overload
def outer(a: F, b: F) -> F: ...
def outer(a: Format, b: Format) -> Format:
    """Return the outer product of two tensors, numpy.multiply.outer of their dense arrays.

    The result has the same class, and the legs of `a` before those of `b`. For two LowRank it is a TensorTrain of four
    legs.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> pair = tnlib.TensorTrain([np.eye(2)[None], np.eye(2)[..., None]])
    >>> tnlib.outer(pair, pair).ranks
    (1, 2, 1, 2, 1)
    """
    return _combine("outer", a, b)  # type: ignore[no-any-return]


def _combine(verb: str, a: Any, b: Any) -> Any:
    refuse_other_arrays(verb, "a", a)
    refuse_other_arrays(verb, "b", b)
    product = implementation(verb, type(a))
    if product is None or type(a) is not type(b):
        advice = advice_for(a, advice_for(b, "convert one of them with tnlib.convert"))
        if type(a) is type(b) and implementation("kron", type(a)) is not None:
            advice = "call tnlib.kron for the Kronecker product, or convert both to TensorTrain with tnlib.convert"
        raise ArgumentTypeError(
            f"{verb}: a and b must be two formats of one class, {list_formats(verb)}, got a {type(a).__name__} and a "
            f"{type(b).__name__}; {advice}."
        )
    if verb == "kron" and a.ndim != b.ndim:
        raise ArgumentError(
            f"kron: a and b must have equally many legs, got {plural(a.ndim, 'leg')} and {plural(b.ndim, 'leg')}; "
            "use tnlib.outer for the product with the legs of both."
        )
    return product(a, b)
