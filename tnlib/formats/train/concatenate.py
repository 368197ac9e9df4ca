"""Concatenation of trains along a leg."""

from __future__ import annotations

from collections.abc import Sequence

from tnlib._errors import ArgumentError
from tnlib._validate import as_list, as_position
from tnlib.formats.train.arguments import as_train
from tnlib.formats.train.cores import add_cores, with_common_exponent
from tnlib.formats.train.format import TensorTrain


def concatenate(trains: Sequence[TensorTrain], axis: int = 0) -> TensorTrain:
    """Return trains concatenated along one leg, as numpy.concatenate does for arrays; ranks add up.

    Parameters
    ----------
    trains
        Trains whose other legs agree.
    axis
        The leg along which trains are concatenated; negative numbers count from the end.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ones = tnlib.TensorTrain([np.ones((1, 2, 1))] * 2)
    >>> tnlib.concatenate([ones, 5 * ones], axis=1).full()
    array([[1., 1., 5., 5.],
           [1., 1., 5., 5.]])
    """
    for j, train in enumerate(as_list("concatenate", "trains", trains, "trains")):
        as_train("concatenate", f"train {j}", train, TensorTrain)
    shape = trains[0].shape
    axis = as_position("concatenate", "axis", axis, len(shape), "legs")
    for j, train in enumerate(trains):
        differ = [k for k, (n, m) in enumerate(zip(shape, train.shape, strict=False)) if n != m and k != axis]
        if differ or train.ndim != len(shape):
            where = f"leg {differ[0]}" if differ else "the number of legs"
            raise ArgumentError(
                f"concatenate: all legs but leg {axis} must agree, got shapes {shape} and {train.shape} of train {j}, "
                f"which differ in {where}; slice or pad one of them."
            )
    terms, exponent = with_common_exponent([(train.cores, train.exponent) for train in trains])
    return TensorTrain.from_sweep(add_cores(terms, stacked=axis), None, exponent).folded()
