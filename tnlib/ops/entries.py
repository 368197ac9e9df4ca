"""Entries of a format at many indices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import refuse_other_arrays, wrong_type
from tnlib._format import Format
from tnlib._registry import implementation
from tnlib._typing import Array
from tnlib._validate import to_numpy
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.linalg.scaling import shift_in_range
from tnlib.linalg.threads import single_threaded_blas
from tnlib.ops.convert import convert


@single_threaded_blas
def entries(t: Format, indices: npt.ArrayLike) -> Array:
    """Return the entries (...) of `t` at indices (..., d), in its dtype, without forming other entries.

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
    refuse_other_arrays("entries", "t", t)
    if implementation("entries", type(t)) is None:
        t = convert(t, TensorTrain)
    evaluate = implementation("entries", type(t))
    paired = isinstance(t, TTMatrix)
    legs = tuple(n for core in t.cores for n in core.shape[1:-1]) if isinstance(t, TTMatrix) else t.shape
    points, shape = _as_points(indices, legs, paired=paired)
    if len(points) == 0:
        return np.empty(shape, t.dtype)
    values, exponents = evaluate(t, points)  # type: ignore[misc]
    return shift_in_range(values, exponents, "entries: every entry", "lower the log_scale").reshape(shape)


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
