"""Arrays of other libraries: the namespace of the array API standard, conversions, and the primitives of sweeps.

The primitives are `gram`, `project`, `qr`, `eigh`, `svd` and `norm`. Singular values, on which ranks are decided, and
signs are computed on the host, by the code for numpy. numpy arrays themselves have paths of their own, with compiled
kernels; nothing here is called for them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import HALF, NATIVE, import_optional, to_numpy

OtherArray: TypeAlias = Any  # of torch, CuPy, JAX, array_api_strict, ...

_BLOCK = 1 << 20  # entries whose squares are summed at a time
_LARGEST_STEP = 100  # powers of two by which an array is multiplied at once, in the range of 32 bits


def namespace(*arrays: OtherArray) -> Any:
    """Return the namespace of the array API standard for `arrays`, all of one library."""
    compat = import_optional("arrays of other libraries", "array_api_compat", "array-api-compat")
    return compat.array_namespace(*arrays)


def library_of(x: OtherArray) -> str:
    """Return the name of the library of `x`, such as "torch", also for subclasses of its arrays defined elsewhere."""
    if hasattr(x, "resolve_conj"):
        return "torch"
    return type(x).__module__.partition(".")[0]


def device_of(x: OtherArray) -> Any:
    """Return the device of `x`."""
    return import_optional("arrays of other libraries", "array_api_compat", "array-api-compat").device(x)


def dtype_of(x: OtherArray) -> np.dtype[Any]:
    """Return the dtype of `x`, of a name that numpy knows, as a numpy dtype."""
    return np.dtype(dtype_name(x))


def dtype_name(x: OtherArray) -> str:
    """Return "float64" for torch.float64."""
    return str(x.dtype).rpartition(".")[2]


def to_host(x: OtherArray) -> Array:
    """Return `x` as a numpy array, without its gradient, and without a copy where it is on the host."""
    if hasattr(x, "resolve_conj"):  # torch
        return to_numpy("tnlib", "the array", x)
    return np.from_dlpack(x, device="cpu")


def from_host(a: Array, like: OtherArray) -> OtherArray:
    """Return a copy of `a` as an array of the library and on the device of `like`."""
    return namespace(like).asarray(np.array(a), device=device_of(like))


def as_other_array(function: str, parameter: str, x: OtherArray, *, ndim: int | None = None) -> OtherArray:
    """Return `x` as a finite array of its own library, of a native dtype: what `as_array` is for numpy."""
    xp, name = namespace(x), dtype_name(x)
    _refuse_without_entries(function, parameter, x)
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


def _refuse_without_entries(function: str, parameter: str, x: OtherArray) -> None:
    """Raise where `x` is a tensor of torch that does not store every entry."""
    layout = str(getattr(x, "layout", "torch.strided")).rpartition(".")[2]
    if layout != "strided" or getattr(x, "is_meta", False):
        kind = f"a {layout} one" if layout != "strided" else "one on the meta device"
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a dense tensor with entries, got {kind}; pass .to_dense() of it, or load "
            "it first."
        )


def detached(x: OtherArray) -> OtherArray:
    """Return `x` without its gradient, for what is decided by its values."""
    return x.detach() if hasattr(x, "detach") else x


def all_finite(x: OtherArray) -> bool:
    """Test if no entry is NaN or inf."""
    xp = namespace(x)
    return bool(xp.all(xp.isfinite(detached(x))))


def refuse_different_libraries(function: str, arrays: Sequence[OtherArray]) -> None:
    """Raise where `arrays` are not of one library on one device."""
    kinds = [f"{library_of(x)} on {device_of(x)}" if hasattr(x, "device") else library_of(x) for x in arrays]
    other = next((kind for kind in kinds if kind != kinds[0]), None)
    if other is not None:
        raise ArgumentTypeError(
            f"{function}: all arrays must be of one library on one device, got {kinds[0]} and {other}; convert them."
        )


def adjoint(x: OtherArray) -> OtherArray:
    """Return x^H of `x` (..., m, n)."""
    xp = namespace(x)
    return xp.matrix_transpose(xp.conj(x) if is_complex(x) else x)


def is_complex(x: OtherArray) -> bool:
    """Test if the entries of `x` are complex numbers."""
    return dtype_name(x).startswith("complex")


def gram(x: OtherArray) -> OtherArray:
    """Return x x^H (m, m) of `x` (m, n)."""
    return namespace(x).matmul(x, adjoint(x))  # m [n] m


def project(e: OtherArray, x: OtherArray) -> OtherArray:
    """Return e^H x (r, n) of `e` (m, r) and `x` (m, n)."""
    return namespace(x).matmul(adjoint(e), x)  # r [m] n


def qr(x: OtherArray) -> tuple[OtherArray, OtherArray]:
    """Return q (m, k) isometric and r (k, n); k = min(m, n)."""
    q, r = namespace(x).linalg.qr(x)
    return q, r


def eigh(x: OtherArray) -> tuple[Array, Array]:
    """Return the eigenvalues (m,), ascending, and eigenvectors (m, m) of a Hermitian matrix, on the host."""
    values, vectors = namespace(x).linalg.eigh(x)
    return to_host(values), to_host(vectors)


def svd(x: OtherArray) -> tuple[OtherArray, OtherArray, OtherArray]:
    """Return u (m, k), s (k,), vh (k, n) of `x` (m, n); k = min(m, n)."""
    u, s, vh = namespace(x).linalg.svd(x, full_matrices=False)
    return u, s, vh


def norm(x: OtherArray) -> float:
    """Return the Frobenius norm of an array whose squares are in range, summed in double precision by blocks."""
    xp = namespace(x)
    flat = xp.reshape(detached(x), (-1,))
    size = flat.shape[0]
    parts = [flat[i : min(i + _BLOCK, size)] for i in range(0, size, _BLOCK)]
    if is_complex(x):
        parts = [half for part in parts for half in (xp.real(part), xp.imag(part))]
    wide = [xp.astype(part, xp.float64) for part in parts]
    return math.sqrt(float(xp.sum(xp.stack([xp.sum(part * part) for part in wide]))))


def largest(x: OtherArray) -> float:
    """Return the largest absolute real or imaginary part."""
    xp, x = namespace(x), detached(x)
    parts = (xp.real(x), xp.imag(x)) if is_complex(x) else (x,)
    return max(float(xp.max(xp.abs(part))) for part in parts)


def shift(x: OtherArray, e: int) -> OtherArray:
    """Return `x` * 2**`e`, exact within the range of the dtype."""
    e = max(-10_000, min(10_000, e))
    with np.errstate(over="ignore", invalid="ignore"):  # array_api_strict warns as numpy does
        while e:
            step = max(-_LARGEST_STEP, min(_LARGEST_STEP, e))
            x, e = x * 2.0**step, e - step
    return x


def records_gradient(x: OtherArray) -> bool:
    """Test if torch records what is computed from x: an array of a format may be a leaf under `torch.no_grad()`."""
    return bool(getattr(x, "requires_grad", False)) and bool(sys.modules["torch"].is_grad_enabled())
