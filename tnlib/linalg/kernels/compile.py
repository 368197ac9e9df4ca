"""Compilation of kernels by numba: once, cached on disk if a folder is writable, without holding the GIL."""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be taken in any order, which is what lets them run in vector registers. NaN and inf keep their meaning.
_SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


def kernel(function: F) -> F:
    """Return `function` compiled at the first call with each combination of argument types; safe to share by threads.

    Numba's own threads are not used: not all of its threading layers can be entered from two Python threads at once,
    or after a fork, and a caller may do either.

    Every combination of types gets a name, and so a file in the cache, of its own. Numba would number the types of one
    function in the order of its calls, so that two processes that compile for different types at the same time would
    use the same number.
    """
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @functools.wraps(function)
    def call(*arguments: Any) -> None:
        kinds = tuple(map(numba.typeof, arguments))
        if kinds not in compiled:  # numba has a lock under which the first call compiles
            compiled.setdefault(kinds, _compile(function, "_".join(map(str, kinds))))
        compiled[kinds](*arguments)

    call.compiled = compiled  # type: ignore[attr-defined]  # to inspect the compiled functions and their cache
    return cast(F, call)


def inlined(function: F) -> F:
    """Return `function` for inlining into kernels."""
    return cast(F, numba.njit(function, inline="always", fastmath=_SUMS_IN_ANY_ORDER))


def _compile(function: Callable[..., Any], kinds: str) -> Callable[..., Any]:
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__qualname__ = f"{function.__name__}_{zlib.crc32(kinds.encode()):08x}"
    copy.__module__ = function.__module__
    try:
        return numba.njit(copy, cache=True, nogil=True, fastmath=_SUMS_IN_ANY_ORDER)
    except RuntimeError:  # no folder is writable: every process compiles anew
        return numba.njit(copy, nogil=True, fastmath=_SUMS_IN_ANY_ORDER)
