"""Contraction of some legs of a format with vectors, with a train, or by summation; entries at many indices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from tnlib._array_api import from_host, reshape
from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import refuse_other_arrays, wrong_type
from tnlib._format import Format, LinearFormat
from tnlib._registry import implementation, require
from tnlib._typing import Array
from tnlib._validate import as_array, as_legs, plural, to_numpy
from tnlib.formats.train.format import TensorTrain, Train
from tnlib.formats.train.operations import contract_trains
from tnlib.formats.train.tt_matrix import TTMatrix, as_train
from tnlib.linalg.scaling import Scaled, rescale, shift_in_range
from tnlib.linalg.threads import single_threaded_blas
from tnlib.ops.convert import convert

F = TypeVar("F", bound=LinearFormat)

_ADVICE = "convert it with tnlib.convert"


@overload
def contract(t: F, other: Mapping[int, npt.ArrayLike], legs: None = None) -> F | float | complex: ...
@overload
def contract(
    t: TensorTrain, other: TensorTrain, legs: int | Sequence[int] | None = None
) -> TensorTrain | TTMatrix | float | complex: ...
@single_threaded_blas
def contract(
    t: LinearFormat, other: Mapping[int, npt.ArrayLike] | TensorTrain, legs: int | Sequence[int] | None = None
) -> LinearFormat | float | complex:
    """Return `t` with some legs contracted with vectors, or with a train; nothing is conjugated.

    Parameters
    ----------
    t
        A TensorTrain; for vectors a Tucker or CP as well.
    other
        {leg: vector (n,)}; or a TensorTrain with as many legs as `legs`, of which leg j is contracted with leg legs[j];
        or a TensorTrain with as many legs as `t`: leg k of `t` is contracted with leg k of `other` for k in `legs`, and
        the remaining legs of both are kept.
    legs
        With a train: the legs that are contracted, in ascending order.

    Returns
    -------
    TensorTrain | TTMatrix | Tucker | CP | float | complex
        A format of the class of `t` with the remaining legs. If legs of both are kept, a TTMatrix with the legs of `t`
        as rows and those of `other` as columns. If no leg remains, a number. `contract(psi, psi.conj(), legs)` is a
        reduced density matrix.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ghz = tnlib.convert(tnlib.CP([0.5**0.5] * 2, [np.eye(2)] * 100), tnlib.TensorTrain)
    >>> tnlib.contract(ghz, {k: np.ones(2) for k in range(99)}).full().round(4)
    array([0.7071, 0.7071])
    >>> tnlib.contract(ghz, ghz.conj(), range(1, 100)).full().round(4)
    array([[0.5, 0. ],
           [0. , 0.5]])
    """
    if isinstance(other, Mapping):
        if legs is not None:
            raise ArgumentTypeError(
                f"contract: legs must be left out with vectors, got {legs!r}; the vectors name them."
            )
        contract_vectors = require("contract", "contract_vectors", "t", t, _ADVICE)
        scaled = {leg: rescale(vector) for leg, vector in _as_vectors(t.shape, other).items()}
        value = contract_vectors(t, {leg: vector.array for leg, vector in scaled.items()})
        exponent = sum(vector.exponent for vector in scaled.values())
        return _times_power("contract", value, exponent)  # type: ignore[no-any-return]
    a, b = (as_train("contract", name, x, TensorTrain).fused() for name, x in (("t", t), ("other", other)))
    if legs is None:
        raise ArgumentTypeError("contract: legs must name the legs to contract, got None; pass for example (0, 1).")
    chosen = as_legs("contract", "legs", legs, t.ndim, proper=False)
    if not chosen:
        raise ArgumentError("contract: legs must name at least one leg, got none; use tnlib.outer for the product.")
    if list(chosen) != sorted(chosen):
        raise ArgumentError(f"contract: legs must be in ascending order, got {legs!r}; sort them.")
    _refuse_unequal_sizes(a, b, chosen)
    return _times_power("contract", contract_trains(a, b, chosen))  # type: ignore[no-any-return]


@single_threaded_blas
def sum_legs(t: F, axis: int | Sequence[int] | None = None) -> F | float | complex:
    """Return `t` summed over some or all legs: a format of the same class, or a number if no leg remains.

    Parameters
    ----------
    t
        A TensorTrain, Tucker or CP.
    axis
        Leg numbers; None for all, () for none. Negative ones count from the end.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tt = tnlib.TensorTrain([np.ones((1, 2, 1))] * 50)
    >>> tnlib.sum_legs(tt) == 2.0**50, tnlib.sum_legs(tt, range(1, 50)).shape
    (True, (2,))
    """
    contract_vectors = require("sum_legs", "contract_vectors", "t", t, _ADVICE)
    chosen = range(t.ndim) if axis is None else as_legs("sum_legs", "axis", axis, t.ndim, proper=False)
    shape, dtype = t.shape, t.dtype
    ones = {n: np.ones(n, dtype) for n in set(shape)}
    value = contract_vectors(t, {k: ones[shape[k]] for k in sorted(chosen)})
    return _times_power("sum_legs", value)  # type: ignore[no-any-return]


def _as_vectors(shape: tuple[int, ...], vectors: Mapping[Any, Any]) -> dict[int, Array]:
    legs = as_legs("contract", "legs", list(vectors), len(shape), proper=False)
    out: dict[int, Array] = {}
    for leg, vector in zip(legs, vectors.values(), strict=True):
        a = as_array("contract", f"the vector of leg {leg}", vector, ndim=1)
        if len(a) != shape[leg]:
            raise ArgumentError(
                f"contract: the vector of leg {leg} must have shape ({shape[leg]},), got {a.shape}; "
                "it is contracted with that leg."
            )
        out[leg] = a
    return out


def _refuse_unequal_sizes(t: TensorTrain, other: TensorTrain, legs: Sequence[int]) -> None:
    if other.ndim not in (len(legs), t.ndim):
        raise ArgumentError(
            f"contract: other must have {plural(len(legs), 'leg')}, those contracted, or {t.ndim} like t, got "
            f"{other.ndim}; sum over the others first."
        )
    shape, of_other = t.shape, other.shape
    sizes = of_other if len(of_other) == len(legs) else [of_other[k] for k in legs]
    for k, size in zip(legs, sizes, strict=True):
        if shape[k] != size:
            raise ArgumentError(f"contract: leg {k} must have one size, got {shape[k]} and {size}; it is contracted.")


def _times_power(function: str, value: Any, exponent: int = 0) -> Any:
    """Return `value` times 2**`exponent`: a format, or a number where `value` is `Scaled`."""
    if isinstance(value, Scaled):
        try:
            return Scaled(value.array, value.exponent + exponent).item()
        except OverflowError:
            raise ArgumentError(
                f"{function}: the result must lie below 1.8e308, got one beyond; lower the log_scale first."
            ) from None
    largest = np.finfo(value.dtype).maxexp - 8  # of one exact multiplication
    while exponent:
        step = max(-largest, min(largest, exponent))
        value, exponent = value * 2.0**step, exponent - step
    return value


@single_threaded_blas
def entries(t: Format, indices: npt.ArrayLike) -> Array:
    """Return the entries (...) of `t` at indices (..., d), in its dtype, without forming other entries.

    Trains may have arrays of another library, such as torch, which differentiates the entries.

    Parameters
    ----------
    t
        A TensorTrain, TTMatrix, Tucker, CP, LowRank, or another format with a conversion to a train.
    indices
        Integers (..., d), one for each leg; for a TTMatrix (..., d, 2), row and column of each core. Negative ones
        count from the end.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ghz = tnlib.convert(tnlib.CP([1.0, 1.0], [np.eye(2)] * 100), tnlib.TensorTrain)
    >>> tnlib.entries(ghz, [[0] * 100, [1] * 100, [0, 1] * 50])
    array([1., 1., 0.])
    """
    if not isinstance(t, Format):
        raise wrong_type("entries", "t", "a format", t, "decompose it first, for example with tnlib.tt_svd")
    if not isinstance(t, Train):
        refuse_other_arrays("entries", "t", t)
    if implementation("entries", type(t)) is None:
        t = convert(t, TensorTrain)
    evaluate = implementation("entries", type(t))
    paired = isinstance(t, TTMatrix)
    legs = tuple(n for core in t.cores for n in core.shape[1:-1]) if isinstance(t, TTMatrix) else t.shape
    points, shape = _as_points(indices, legs, paired=paired)
    if len(points) == 0:
        return from_host(np.empty(shape, t.dtype), t.arrays()[0])  # type: ignore[no-any-return]
    values, exponents = evaluate(t, points)  # type: ignore[misc]
    return reshape(shift_in_range(values, exponents, "entries: every entry", "lower the log_scale"), shape)  # type: ignore[no-any-return]


def _as_points(indices: Any, legs: tuple[int, ...], *, paired: bool) -> tuple[Array, tuple[int, ...]]:
    """Return indices from 0, (N, d), row and column of a pair as one index, and the shape (...) of the entries."""
    a = to_numpy("entries", "indices", indices)
    last = (len(legs) // 2, 2) if paired else (len(legs),)
    if a.dtype.kind not in "iu":
        raise ArgumentTypeError(f"entries: indices must be integers, got dtype {a.dtype}; slices go into t[...].")
    if a.shape[a.ndim - len(last) :] != last or a.ndim < len(last):
        expected = ", ".join(map(str, ("...", *last)))
        raise ArgumentError(
            f"entries: indices must have shape ({expected}), got {a.shape}; pass one index for every leg."
        )
    shape = a.shape[: a.ndim - len(last)]
    a = a.reshape(math.prod(shape), len(legs)).astype(np.int64, copy=False)
    sizes = np.array(legs)
    outside = (a < -sizes) | (a >= sizes)
    if outside.any():
        point, leg = (int(i) for i in np.argwhere(outside)[0])
        raise ArgumentError(
            f"entries: indices of leg {leg} must lie between {-sizes[leg]} and {sizes[leg] - 1}, got {a[point, leg]} "
            f"for point {point}; count from 0."
        )
    a = np.where(a < 0, a + sizes, a)
    return (a[:, 0::2] * sizes[1::2] + a[:, 1::2] if paired else a), shape
