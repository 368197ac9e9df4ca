"""How kernels are compiled: once, cached on disk where a folder can be written, and without holding the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be taken in any order, which is what lets them run in vector registers. NaN and inf keep their meaning.
_SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


def kernel(function: F) -> F:
    """Compile `function` on its first call; several Python threads may run it side by side.

    Numba's own threads are not used: its threading layers cannot all be entered from two Python threads at once,
    nor after a fork, and a caller may do either.
    """
    try:
        return cast(F, numba.njit(function, cache=True, nogil=True, fastmath=_SUMS_IN_ANY_ORDER))
    except RuntimeError:  # no folder for a cache can be written: every process compiles anew
        return cast(F, numba.njit(function, nogil=True, fastmath=_SUMS_IN_ANY_ORDER))


def inlined(function: F) -> F:
    """Compile `function` into the kernels that call it."""
    return cast(F, numba.njit(function, inline="always", fastmath=_SUMS_IN_ANY_ORDER))
