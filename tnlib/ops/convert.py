"""Exact conversion of one format to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from tnlib._errors import ArgumentTypeError
from tnlib._fit import refuse_other_arrays, wrong_type
from tnlib._format import Format
from tnlib._registry import Implementation, format_class, implementation
from tnlib._validate import as_sizes
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix, split_legs
from tnlib.linalg.threads import single_threaded_blas

F = TypeVar("F", bound=Format)

# The decomposition that approximates a format where no conversion is exact.
_DECOMPOSITIONS = {
    "CP": "tnlib.cp",
    "Tucker": "tnlib.tucker",
    "TensorTrain": "tnlib.tt_svd",
    "TTMatrix": "tnlib.ttm_svd",
    "LowRank": "tnlib.svd",
    "SVD": "tnlib.svd",
}


@single_threaded_blas
def convert(t: Format, kind: type[F], *, row_shape: Sequence[int] | None = None) -> F:
    """Return `t` as a `kind`, equal to roundoff; raise ArgumentTypeError if there is no exact conversion.

    CP becomes Tucker or a train with diagonal cores; Tucker a train, and a train Tucker at its numerical ranks; a
    TT-matrix a train with fused legs, and back; LowRank and SVD a train of two cores, and back; KroneckerTerms a
    TT-matrix of two cores, and back; a train its Vidal form, and back; and every format with two legs any other one.

    Parameters
    ----------
    t
        Any format.
    kind
        TensorTrain, TTMatrix, Tucker, CP, LowRank, SVD, KroneckerTerms or Vidal.
    row_shape
        Only from TensorTrain to TTMatrix: the number of rows of each leg. By default all, for a matrix of one column.

    Returns
    -------
    kind
        Tucker has orthonormal factors; trains have no centre.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> cp = tnlib.CP([2.0, 1.0], [np.eye(3, 2)] * 4)
    >>> train = tnlib.convert(cp, tnlib.TensorTrain)
    >>> train.ranks, tnlib.convert(train, tnlib.Tucker).ranks
    ((1, 2, 2, 2, 1), (2, 2, 2, 2))
    """
    if not isinstance(kind, type) or not issubclass(kind, Format):
        raise ArgumentTypeError(f"convert: kind must be a format, got {kind!r}; pass for example tnlib.TensorTrain.")
    if not isinstance(t, Format):
        remedy = f"decompose it first, for example with {_DECOMPOSITIONS.get(kind.__name__, 'tnlib.tt_svd')}"
        raise wrong_type("convert", "t", "a format", t, remedy)
    refuse_other_arrays("convert", "t", t)
    if row_shape is not None:
        if not isinstance(t, TensorTrain) or kind is not TTMatrix:
            raise ArgumentTypeError(
                f"convert: row_shape must be left out from {type(t).__name__} to {kind.__name__}, got {row_shape}; "
                "it splits the legs of a TensorTrain."
            )
        return split_legs(t, as_sizes("convert", "row_shape", row_shape))  # type: ignore[return-value]
    if isinstance(t, kind):
        return t
    value: Any = t
    try:
        for step in _steps(t, kind):
            value = step(value)
    except ArgumentTypeError:  # raised by a step that does not hold this value exactly
        raise _not_exact(t, kind) from None
    return value  # type: ignore[no-any-return]


def _steps(t: Format, kind: type[Format]) -> list[Implementation]:
    """Return one conversion, or two through a LowRank or a TensorTrain of the same shape."""
    target = f"to_{kind.__name__}"
    direct = implementation(target, type(t))
    if direct is not None:
        return [direct]
    if TTMatrix not in (type(t), kind):  # its legs come in pairs
        for middle in ("LowRank", "TensorTrain") if t.ndim == 2 else ("TensorTrain",):
            steps = implementation(f"to_{middle}", type(t)), implementation(target, format_class(middle))
            if None not in steps:
                return list(steps)  # type: ignore[arg-type]
    raise _not_exact(t, kind)


def _not_exact(t: Format, kind: type[Format]) -> ArgumentTypeError:
    remedy = _DECOMPOSITIONS.get(kind.__name__)
    advice = f"call {remedy} on its .full()" if remedy else "choose another format"
    return ArgumentTypeError(
        f"convert: t must be one that a {kind.__name__} holds exactly, got a {type(t).__name__} of shape "
        f"{t.shape}; {advice}."
    )
