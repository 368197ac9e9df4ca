"""How kernels are compiled: once, cached on disk where a folder can be written, and without holding the GIL."""

from __future__ import annotations

import functools
import os
import threading
import types
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be taken in any order, which is what lets them run in vector registers. NaN and inf keep their meaning.
_SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


class _Compiler:
    """One thread at a time compiles; a forked child starts with a lock that nobody holds."""

    lock = threading.Lock()

    @classmethod
    def unlock(cls) -> None:
        """Forget who held the lock before a fork."""
        cls.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Compiler.unlock)


def kernel(function: F) -> F:
    """Compile `function` when it is first called with arguments of some types; Python threads may share it.

    Numba's own threads are not used: its threading layers cannot all be entered from two Python threads at once,
    nor after a fork, and a caller may do either.

    Every combination of types gets a name, and so a file in the cache, of its own. Numba would number the types of
    one function in the order of their arrival, and two processes that arrive together with different ones would
    give both the same number.
    """
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @functools.wraps(function)
    def call(*arguments: Any) -> None:
        kinds = tuple(map(numba.typeof, arguments))
        if kinds not in compiled:
            with _Compiler.lock:
                compiled.setdefault(kinds, _compile(function, "_".join(map(str, kinds))))
        compiled[kinds](*arguments)

    call.compiled = compiled  # type: ignore[attr-defined]  # for a look at what was compiled, and what came from disk
    return cast(F, call)


def inlined(function: F) -> F:
    """Compile `function` into the kernels that call it."""
    return cast(F, numba.njit(function, inline="always", fastmath=_SUMS_IN_ANY_ORDER))


def _compile(function: Callable[..., Any], kinds: str) -> Callable[..., Any]:
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__qualname__ = f"{function.__name__}_{zlib.crc32(kinds.encode()):08x}"
    copy.__module__ = function.__module__
    try:
        return numba.njit(copy, cache=True, nogil=True, fastmath=_SUMS_IN_ANY_ORDER)
    except RuntimeError:  # no folder for a cache can be written: every process compiles anew
        return numba.njit(copy, nogil=True, fastmath=_SUMS_IN_ANY_ORDER)
