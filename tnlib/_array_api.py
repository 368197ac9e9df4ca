"""Arrays of numpy, torch or another library of the array API standard: checks, conversions, and shared operations.

The sweeps of formats are written over `reshape`, `permute`, `conj`, `@` and the factorizations of `tnlib.linalg`. Each
of these has a fast path for numpy, and goes through the namespace of the array API standard for all other arrays, so
that torch differentiates through the sweeps. What is discrete is computed on the host and enters as a constant: ranks,
powers of two, signs and phases, the bases of equal singular values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import HALF, NATIVE, import_optional, is_other_array, refuse_without_entries, to_numpy

AnyArray: TypeAlias = Any  # of numpy, torch, CuPy, JAX, array_api_strict, ...


def namespace(*arrays: AnyArray) -> Any:
    """Return the namespace of the array API standard for `arrays`, all of one library."""
    compat = import_optional("arrays of other libraries", "array_api_compat", "array-api-compat")
    return compat.array_namespace(*arrays)


def library_of(x: AnyArray) -> str:
    """Return the name of the library of `x`, such as "torch", also for subclasses of its arrays defined elsewhere."""
    if hasattr(x, "resolve_conj"):
        return "torch"
    return type(x).__module__.partition(".")[0]


def device_of(x: AnyArray) -> Any:
    """Return the device of `x`."""
    return import_optional("arrays of other libraries", "array_api_compat", "array-api-compat").device(x)


def dtype_of(x: AnyArray) -> np.dtype[Any]:
    """Return the dtype of `x`, of a name that numpy knows, as a numpy dtype."""
    return x.dtype if isinstance(x, np.ndarray) else np.dtype(_dtype_name(x))


@functools.cache
def eps(dtype: np.dtype[Any]) -> float:
    """Return the distance from 1 to the next number of `dtype`."""
    return float(np.finfo(dtype).eps)


def _dtype_name(x: AnyArray) -> str:
    """Return "float64" for torch.float64."""
    return str(x.dtype).rpartition(".")[2]


def to_host(x: AnyArray) -> Array:
    """Return `x` as a numpy array, without its gradient, and without a copy where it is on the host."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "resolve_conj"):  # torch
        return to_numpy("tnlib", "the array", x)
    return np.from_dlpack(x, device="cpu")


def from_host(a: Array, like: AnyArray) -> AnyArray:
    """Return a copy of `a` as an array of the library and on the device of `like`; `a` itself if that is numpy's."""
    if isinstance(like, np.ndarray):
        return a
    return namespace(like).asarray(np.array(a), device=device_of(like))


def as_other_array(function: str, parameter: str, x: AnyArray, *, ndim: int | None = None) -> AnyArray:
    """Return `x` as a finite array of its own library, of a native dtype: what `as_array` is for numpy."""
    xp, name = namespace(x), _dtype_name(x)
    refuse_without_entries(function, parameter, x)
    if name not in NATIVE:
        if name not in HALF and not xp.isdtype(x.dtype, ("bool", "integral")):
            raise ArgumentTypeError(
                f"{function}: {parameter} must be real or complex of 16 to 64 bits a component, got dtype {x.dtype}; "
                "convert it, for example to float64."
            )
        x = xp.astype(x, xp.float32 if name in HALF else xp.float64)
    if (ndim is not None and x.ndim != ndim) or x.ndim == 0 or 0 in x.shape:
        expected = "at least one leg" if ndim is None else f"{ndim} legs"
        raise ArgumentError(
            f"{function}: {parameter} must have {expected} and no leg of size 0, got shape {tuple(x.shape)}; "
            "reshape it first."
        )
    if not all_finite(x):
        raise ArgumentError(f"{function}: {parameter} must be finite, got NaN or inf; replace them first.")
    return x


def refuse_different_libraries(function: str, arrays: Sequence[AnyArray]) -> None:
    """Raise where some of `arrays` are not numpy's, and not all are of one library on one device."""
    if set(map(type, arrays)) == {np.ndarray} or not any(map(is_other_array, arrays)):
        return
    kinds = [f"{library_of(x)} on {device_of(x)}" if hasattr(x, "device") else library_of(x) for x in arrays]
    other = next((kind for kind in kinds if kind != kinds[0]), None)
    if other is not None:
        raise ArgumentTypeError(
            f"{function}: all arrays must be of one library on one device, got {kinds[0]} and {other}; convert them."
        )


def records_gradient(x: AnyArray) -> bool:
    """Test if torch records what is computed from x: an array of a format may be a leaf under `torch.no_grad()`."""
    return bool(getattr(x, "requires_grad", False)) and bool(sys.modules["torch"].is_grad_enabled())


def detached(x: AnyArray) -> AnyArray:
    """Return `x` without its gradient, for what is decided by its values."""
    return x.detach() if hasattr(x, "detach") else x


def all_finite(x: AnyArray) -> bool:
    """Test if no entry is NaN or inf."""
    xp = np if isinstance(x, np.ndarray) else namespace(x)
    return bool(xp.all(xp.isfinite(detached(x))))


def is_complex(x: AnyArray) -> bool:
    """Test if the entries of `x` are complex numbers."""
    return x.dtype.kind == "c" if isinstance(x, np.ndarray) else _dtype_name(x).startswith("complex")


def reshape(x: AnyArray, shape: Sequence[int]) -> AnyArray:
    """Return `x` with these legs, in C order; one size may be -1."""
    return x.reshape(shape) if isinstance(x, np.ndarray) else namespace(x).reshape(x, tuple(shape))


def permute(x: AnyArray, axes: Sequence[int]) -> AnyArray:
    """Return `x` with its legs in this order."""
    return x.transpose(axes) if isinstance(x, np.ndarray) else namespace(x).permute_dims(x, tuple(axes))


def contiguous(x: AnyArray) -> AnyArray:
    """Return `x` with entries in C order in memory, where that is numpy's."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x


def conj(x: AnyArray) -> AnyArray:
    """Return the complex conjugate."""
    if isinstance(x, np.ndarray):
        return x.conj()
    return namespace(x).conj(x) if is_complex(x) else x


def adjoint(x: AnyArray) -> AnyArray:
    """Return x^H of a matrix `x` (m, n)."""
    return x.conj().T if isinstance(x, np.ndarray) else namespace(x).matrix_transpose(conj(x))


def astype(x: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Return `x` with entries of a numpy `dtype`, itself where it has that dtype."""
    if isinstance(x, np.ndarray):
        return x.astype(dtype, copy=False)
    xp = namespace(x)
    return xp.astype(x, getattr(xp, dtype.name), copy=False)


def tensordot(x: AnyArray, y: AnyArray, axes: tuple[Sequence[int], Sequence[int]]) -> AnyArray:
    """Return `x` and `y` contracted over these legs."""
    xp = np if isinstance(x, np.ndarray) else namespace(x, y)
    return xp.tensordot(x, y, axes=(tuple(axes[0]), tuple(axes[1])))


def vdot(x: AnyArray, y: AnyArray) -> AnyArray:
    """Return the sum of conj(x) times y, an array (1,)."""
    if isinstance(x, np.ndarray):
        return np.atleast_1d(np.vdot(x, y))
    return reshape(namespace(x, y).sum(conj(x) * y), (1,))
