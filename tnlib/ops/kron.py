"""Kronecker products and outer products of two formats."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import refuse_other_arrays
from tnlib._format import Format
from tnlib._registry import implementation, list_formats
from tnlib._validate import advice_for, plural
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.train.format import TensorTrain

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
