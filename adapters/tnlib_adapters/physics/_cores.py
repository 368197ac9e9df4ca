"""Arrays on their way in and out: of one precision, copied, and with the scale of a train inside its cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.linalg.scale import largest, shift


def as_one_precision(function: str, parameter: str, arrays: Sequence[Any]) -> list[Array]:
    """Return finite copies of one dtype; real and complex arrays go together, two precisions do not."""
    found = [as_array(function, f"{parameter} {k}", a) for k, a in enumerate(arrays)]
    precisions = {a.real.dtype.name for a in found}
    if len(precisions) > 1:
        raise ArgumentTypeError(
            f"{function}: {parameter}s must have one precision, got {' and '.join(sorted(precisions))}; "
            "convert them to the dtype you want."
        )
    dtype = np.result_type(*found) if found else np.dtype(float)
    return [np.array(a, dtype, order="C") for a in found]


def with_scale(function: str, t: TensorTrain | TTMatrix) -> list[Array]:
    """Return new cores of one dtype that hold exp(log_scale) too, for a library that keeps no scale apart.

    The centre takes all of it, which leaves the gauge as it is; without one, all cores share it.
    """
    cores = [np.array(core, t.dtype, order="C") for core in t.cores]
    if t.log_scale == 0.0:
        return cores
    twos = round(t.log_scale / math.log(2))
    factor = math.exp(t.log_scale - twos * math.log(2))
    takes = range(len(cores)) if t.center is None else [t.center]
    for i, k in enumerate(takes):
        share = (twos + i) // len(takes)  # they add up to twos
        scaled = cores[k] * cores[k].real.dtype.type(factor if i == 0 else 1.0)
        with np.errstate(over="ignore", under="ignore"):
            cores[k] = shift(scaled, max(-4000, min(4000, share)))
        _refuse_out_of_range(function, t, cores[k], was_zero=not scaled.any())
    return cores


def _refuse_out_of_range(function: str, t: TensorTrain | TTMatrix, core: Array, *, was_zero: bool) -> None:
    limits = np.finfo(core.dtype)
    top = largest(core)
    if not was_zero and not limits.tiny / limits.eps <= top < math.inf:
        raise ArgumentError(
            f"{function}: value must fit {t.dtype} without a scale of its own, got log_norm() = {t.log_norm():.1f}; "
            "divide it by its norm first."
        )
