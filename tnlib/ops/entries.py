"""Entries of a format at many indices at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import to_numpy
from tnlib.formats.base import Dense
from tnlib.formats.cp import CP
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.linalg.scale import exponent, shift
from tnlib.linalg.threads import own_threads
from tnlib.ops.convert import convert
from tnlib.ops.trains import take_apart
from tnlib.sweeps.entries import pick_entries, set_aside

_AT_ONCE = 1 << 20  # numbers in the rows that are carried through a train


@own_threads
def entries(value: Any, indices: Any) -> Array:
    """Return the entries of `value` at many indices, nothing else being made.

    Parameters
    ----------
    value
        A TensorTrain, TTMatrix, Tucker, CP or LowRank.
    indices
        Integers (..., d), one for each leg; of a TTMatrix (..., d, 2), row and column for each core. Negative ones
        count from the end. A billion indices are taken in batches.

    Returns
    -------
    Array
        (...), of the dtype of `value`.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If the indices are no integers, do not fit the legs, or an entry leaves the range of the dtype.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ghz = tnlib.convert(tnlib.CP([1.0, 1.0], [np.eye(2)] * 100), tnlib.TensorTrain)
    >>> tnlib.entries(ghz, [[0] * 100, [1] * 100, [0, 1] * 50])
    array([1., 1., 0.])
    """
    if not isinstance(value, Dense):
        raise ArgumentTypeError(
            f"entries: value must be a format, got a {type(value).__name__}; decompose it first, for example with "
            "tnlib.tt_svd."
        )
    if not isinstance(value, TensorTrain | TTMatrix | CP):
        value = convert(value, TensorTrain)
    legs = value.shape
    if isinstance(value, TTMatrix):
        legs = tuple(n for core in value.cores for n in core.shape[1:3])
    points, shape = _as_points(indices, legs, paired=isinstance(value, TTMatrix))
    out = np.empty(len(points), value.dtype)
    if isinstance(value, CP):
        step = max(1, _AT_ONCE // len(value.weights))
        for i in range(0, len(points), step):
            out[i : i + step] = _scaled(*_entries_of_cp(value, points[i : i + step]))
    else:
        cores, twos, factor = take_apart(value)
        step = max(1, _AT_ONCE // max(value.ranks))
        for i in range(0, len(points), step):
            x, e = pick_entries(cores, points[i : i + step])
            out[i : i + step] = _scaled(x * x.real.dtype.type(factor), e + twos)
    if not np.isfinite(out).all():
        raise ArgumentError(
            f"entries: every entry must lie in the range of {out.dtype}, got one beyond; lower the log_scale."
        )
    return out.reshape(shape)


def _as_points(indices: Any, legs: tuple[int, ...], *, paired: bool) -> tuple[Array, tuple[int, ...]]:
    """Return indices from 0, (N, d), row and column of a pair as one, and the shape (...) of what is asked for."""
    a = to_numpy("entries", "indices", indices)
    last = (len(legs) // 2, 2) if paired else (len(legs),)
    if a.dtype.kind not in "iu":
        raise ArgumentTypeError(f"entries: indices must be integers, got dtype {a.dtype}; slices go into value[...].")
    if a.shape[a.ndim - len(last) :] != last or a.ndim < len(last):
        want = ", ".join(map(str, ("...", *last)))
        raise ArgumentError(f"entries: indices must have shape ({want}), got {a.shape}; one index for every leg.")
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


def _entries_of_cp(cp: CP, points: Array) -> tuple[Array, Array]:
    rows, twos = np.ones((len(points), len(cp.weights)), cp.dtype), np.zeros(len(points), np.int64)
    for factor, index in zip((cp.weights[None], *cp.factors), (np.zeros(len(points), int), *points.T), strict=True):
        e = exponent(factor)
        rows, more = set_aside(rows * shift(factor, -e).astype(cp.dtype, copy=False)[index])  # N R
        twos += more + e
    return rows.sum(axis=1), twos


def _scaled(x: Array, e: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is seen by the caller
        moved: Array = np.ldexp(np.ascontiguousarray(x)[:, None].view(x.real.dtype), e[:, None])
    return np.asarray(moved.view(x.dtype)[:, 0])
