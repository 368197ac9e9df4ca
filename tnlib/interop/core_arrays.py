"""Core arrays of other libraries: one dtype and device, finite, and the scale of a train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit, refuse_other_arrays
from tnlib._format import Format
from tnlib._typing import Array
from tnlib._validate import advice_for, as_array
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib.linalg.scaling import largest, shift


def as_one_precision(function: str, parameter: str, arrays: Sequence[Any]) -> list[Array]:
    """Return finite copies of one dtype; real and complex arrays may be mixed, precisions may not."""
    copies = as_copies(function, parameter, arrays)
    dtype = np.result_type(*copies) if copies else np.dtype(float)
    return [a.astype(dtype, copy=False) for a in copies]


def as_copies(function: str, parameter: str, arrays: Sequence[Any]) -> list[Array]:
    """Return finite copies, from numpy or torch, of one precision; real arrays stay real."""
    devices = sorted({str(a.device) for a in arrays if hasattr(a, "resolve_conj")})  # of torch tensors
    if len(devices) > 1:
        raise ArgumentTypeError(
            f"{function}: {parameter}s must lie on one device, got {' and '.join(devices)}; move them to one."
        )
    copies = [np.array(as_array(function, f"{parameter} {k}", a), order="C") for k, a in enumerate(arrays)]
    precisions = {a.real.dtype for a in copies}
    if len(precisions) > 1:
        raise ArgumentTypeError(
            f"{function}: {parameter}s must have one precision, got {' and '.join(sorted(map(str, precisions)))}; "
            "convert them to the dtype you want."
        )
    return copies


def wrong_value(function: str, value: Any, kinds: str) -> ArgumentTypeError:
    """Return the error for a `value` that the library cannot represent."""
    match value:
        case Fit():
            hint = "pass its .value"
        case Vidal():
            hint = "pass value.train()"
        case Format():
            hint = "convert it with tnlib.convert"
        case _:
            hint = "decompose it first"
    return ArgumentTypeError(f"{function}: value must be {kinds}, got a {type(value).__name__}; {hint}.")


def wrong_object(function: str, obj: Any, kinds: str) -> ArgumentTypeError:
    """Return the error for an `obj` of the library that no tnlib format represents."""
    kind = f"{type(obj).__module__.split('.')[0]}.{type(obj).__name__}".removeprefix("builtins.")
    advice = advice_for(obj, "bring it to one of these first")
    if advice.endswith(f".{function}"):  # of the same library
        is_network = hasattr(obj, "tensor_map")
        advice = (
            "tnlib.interop.quimb takes other networks as they are" if is_network else "bring it to one of these first"
        )
    return ArgumentTypeError(f"{function}: obj must be {kinds}, got a {kind}; {advice}.")


def with_scale(function: str, t: TensorTrain | TTMatrix) -> list[Array]:
    """Return new cores that include the factor 2**exponent, for a library without a separate scale.

    The centre absorbs the factor, which preserves the gauge; without a centre, all cores share it.
    """
    refuse_other_arrays(function, "value", t)
    cores = [np.array(core, t.dtype, order="C") for core in t.cores]
    if t.exponent == 0:
        return cores
    takes, limits = range(len(cores)) if t.center is None else [t.center], np.finfo(t.dtype)
    for i, k in enumerate(takes):
        was_zero = not cores[k].any()
        with np.errstate(over="ignore", under="ignore"):
            cores[k] = shift(cores[k], (t.exponent + i) // len(takes))  # they add up to the exponent
        if not was_zero and not limits.tiny / limits.eps <= largest(cores[k]) < math.inf:
            raise ArgumentError(
                f"{function}: value must fit {t.dtype} without a scale of its own, got log_norm() = "
                f"{t.log_norm():.1f}; divide it by its norm first."
            )
    return cores
