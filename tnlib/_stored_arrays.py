"""Stored arrays of formats: read-only, finite, of a native dtype, in one library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tnlib._array_api import as_other_array, astype, dtype_of
from tnlib._errors import ArgumentError
from tnlib._typing import Array, FormatProtocol
from tnlib._validate import NATIVE_DTYPES, as_array, as_list, as_numbers, is_other_array

MAX_NDIM = 64  # of a numpy array
SMALL = 1 << 16  # entries that fit into any memory


def refuse_unallocatable(function: str, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise where a stored array of this shape does not fit into memory."""
    if not fits_in_memory(math.prod(shape), dtype):
        raise ArgumentError(
            f"{function}: every stored array must fit into memory, got one of shape {tuple(shape)}; lower its sizes."
        )


def fits_in_memory(size: int, dtype: np.dtype[Any]) -> bool:
    """Test if an array of `size` numbers can be allocated: before a contraction fills memory piece by piece."""
    try:
        np.empty(size, dtype)  # reserved, and given back untouched
    except (MemoryError, OverflowError, ValueError):
        return False
    return True


def as_stored(format_name: str, parameter: str, a: Any, *, ndim: int | None = None, any_library: bool = False) -> Array:
    """Return a read-only view of one stored array, finite and of a native dtype (a copy where that needs one).

    With `any_library` an array of another library is stored as it is, otherwise as a numpy array.
    """
    if any_library and is_other_array(a):
        return as_other_array(format_name, parameter, a, ndim=ndim)  # type: ignore[no-any-return]
    return read_only(as_array(format_name, parameter, a, ndim=ndim))


def as_stored_list(
    format_name: str, noun: str, arrays: Any, *, ndim: int, any_library: bool = False
) -> tuple[Array, ...]:
    """Return a non-empty tuple of stored arrays, see `as_stored`; messages call array k "noun k"."""
    checked = as_list(format_name, f"{noun}s", arrays, "arrays")
    return tuple(
        as_stored(format_name, f"{noun} {k}", a, ndim=ndim, any_library=any_library) for k, a in enumerate(checked)
    )


def as_numbers_list(format_name: str, noun: str, arrays: Sequence[Any], *, ndim: int) -> list[Array]:
    """Return arrays of any library, of a native dtype; the caller must refuse NaN and inf in those of numpy."""
    out = []
    for k, a in enumerate(arrays):
        if not (type(a) is np.ndarray and a.dtype in NATIVE_DTYPES and a.ndim == ndim and a.size):
            check = as_other_array if is_other_array(a) else as_numbers
            a = check(format_name, f"{noun} {k}", a, ndim=ndim)
        out.append(a)
    return out


def in_common_dtype(arrays: Sequence[Array]) -> list[Array]:
    """Return arrays, all of one library, in the dtype that they promote to."""
    if len({a.dtype for a in arrays}) == 1:
        return list(arrays)
    dtype = np.result_type(*map(dtype_of, arrays))
    return [a if dtype_of(a) == dtype else astype(a, dtype) for a in arrays]


def set_fields(value: object, **fields: Any) -> None:
    """Set validated fields of a frozen dataclass, in its `__post_init__`."""
    vars(value).update(fields)


def read_only(a: Array) -> Array:
    """Return a view of `a` that cannot be written to; arrays of other libraries as they are."""
    if not isinstance(a, np.ndarray) or not a.flags.writeable:
        return a
    view = a.view()
    view.setflags(write=False)
    return view


def numbered(arrays: Mapping[str, Array], prefix: str) -> tuple[Array, ...]:
    """Return the arrays named `prefix`.0, `prefix`.1, ... in order."""
    return tuple(arrays[f"{prefix}.{k}"] for k in range(sum(key.startswith(f"{prefix}.") for key in arrays)))


def refuse_too_large(value: FormatProtocol) -> None:
    """Raise where the dense array of `value` has more legs than numpy allows, or does not fit into memory."""
    name, ndim, size = type(value).__name__, len(value.shape), math.prod(value.shape)
    if ndim > MAX_NDIM:
        raise ArgumentError(
            f"{name}.full: a dense array must have at most {MAX_NDIM} legs, got {ndim}; contract some of them first."
        )
    if not fits_in_memory(size, value.dtype):
        raise ArgumentError(
            f"{name}.full: the dense array must fit into memory, got 2**{size.bit_length() - 1} numbers or more; "
            "slice or contract it first."
        )
