"""Core arrays of other libraries: one dtype and device, finite, the orthogonality centre, and the scale of a train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit, refuse_other_arrays
from tnlib._format import Format
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib.linalg.scaling import largest, shift

# A computed isometry is off by a few eps per column; one multiplied by 1 + 1e-10 must not pass.
_ISOMETRIC = 1e4


def as_one_precision(function: str, parameter: str, arrays: Sequence[Any]) -> list[Array]:
    """Return finite copies of one dtype; real and complex arrays may be mixed, precisions may not."""
    copies = as_copies(function, parameter, arrays)
    dtype = np.result_type(*copies) if copies else np.dtype(float)
    return [a.astype(dtype, copy=False) for a in copies]


def as_copies(function: str, parameter: str, arrays: Sequence[Any]) -> list[Array]:
    """Return finite copies, from numpy or torch, of one precision; real arrays stay real."""
    places = sorted({str(a.device) for a in arrays if _is_torch(a)})
    if len(places) > 1:
        raise ArgumentTypeError(
            f"{function}: {parameter}s must lie on one device, got {' and '.join(places)}; move them to one."
        )
    copies = [_copy(function, f"{parameter} {k}", a) for k, a in enumerate(arrays)]
    precisions = sorted({a.real.dtype.name for a in copies})
    if len(precisions) > 1:
        raise ArgumentTypeError(
            f"{function}: {parameter}s must have one precision, got {' and '.join(precisions)}; "
            "convert them to the dtype you want."
        )
    return copies


def _copy(function: str, parameter: str, a: Any) -> Array:
    if _is_torch(a):
        if a.is_meta or str(a.layout) != "torch.strided":
            problem = "without data" if a.is_meta else f"of layout {a.layout}"
            raise ArgumentTypeError(
                f"{function}: {parameter} must be a dense tensor with data, got one {problem}; make it dense."
            )
        a = a.detach().cpu().resolve_conj().resolve_neg()
        a = a.float() if str(a.dtype) == "torch.bfloat16" else a  # exact; numpy has no bfloat16
    a = as_array(function, parameter, a)
    return np.array(a, order="C")


def _is_torch(a: Any) -> bool:
    """Test if `a` is a torch tensor, without importing torch."""
    return type(a).__module__.split(".")[0] == "torch"


def to_torch(arrays: Sequence[Array]) -> list[Any]:
    """Return torch tensors on the CPU that share memory with the arrays."""
    import torch

    return [torch.from_numpy(a) for a in arrays]


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
    return ArgumentTypeError(f"{function}: obj must be {kinds}, got a {kind}; bring it to one of these first.")


def with_scale(function: str, t: TensorTrain | TTMatrix) -> list[Array]:
    """Return new cores that include the factor 2**exponent, for a library without a separate scale.

    The centre absorbs the factor, which preserves the gauge; without a centre, all cores share it.
    """
    refuse_other_arrays(function, "value", t)
    cores = [np.array(core, t.dtype, order="C") for core in t.cores]
    if t.exponent == 0:
        return cores
    takes = range(len(cores)) if t.center is None else [t.center]
    for i, k in enumerate(takes):
        was_zero = not cores[k].any()
        with np.errstate(over="ignore", under="ignore"):
            cores[k] = shift(cores[k], (t.exponent + i) // len(takes))  # they add up to the exponent
        _refuse_out_of_range(function, t, cores[k], was_zero=was_zero)
    return cores


def _refuse_out_of_range(function: str, t: TensorTrain | TTMatrix, core: Array, *, was_zero: bool) -> None:
    limits = np.finfo(core.dtype)
    top = largest(core)
    if not was_zero and not limits.tiny / limits.eps <= top < math.inf:
        raise ArgumentError(
            f"{function}: value must fit {t.dtype} without a scale of its own, got log_norm() = {t.log_norm():.1f}; "
            "divide it by its norm first."
        )


def find_center(cores: Sequence[Array], claimed: int | None = None) -> int | None:
    """Return the index of an orthogonality centre of cores (r, legs ..., r'), None if there is none.

    Other libraries store the centre, but the user may have changed the cores since; the test costs one product per
    core. If several cores qualify, as in product states, return the claimed one or the first.
    """
    last = len(cores) - 1
    start = last  # all cores after it are right-isometric
    while start > 0 and _is_isometry(cores[start].reshape(len(cores[start]), -1).T):
        start -= 1
    stop = 0  # all cores before it are left-isometric
    while stop < last and _is_isometry(cores[stop].reshape(-1, cores[stop].shape[-1])):
        stop += 1
    if stop < start:
        return None
    return claimed if claimed is not None and start <= claimed <= stop else start


def _is_isometry(a: Array) -> bool:
    columns = a.shape[1]
    if columns > len(a):
        return False
    limit = _ISOMETRIC * np.finfo(a.dtype).eps * np.sqrt(columns)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is not an isometry
        return bool(np.linalg.norm(a.conj().T @ a - np.eye(columns)) <= limit)
