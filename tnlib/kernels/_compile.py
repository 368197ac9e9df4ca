"""How kernels are compiled: once, cached on disk where a folder can be written, and without holding the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])

# Sums may be taken in any order, which is what lets them run in vector registers. NaN and inf keep their meaning.
_SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


def kernel(function: F) -> F:
    """Compile `function` on its first call; several Python threads may run it side by side.

    Numba's own threads are not used: its threading layers cannot all be entered from two Python threads at once,
    nor after a fork, and a caller may do either.
    """
    options = {"nogil": True, "fastmath": _SUMS_IN_ANY_ORDER}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder for a cache can be written: compiled anew by every process
        return numba.njit(function, **options)


def inlined(function: F) -> F:
    """Compile `function` into the kernels that call it."""
    return numba.njit(function, inline="always", fastmath=_SUMS_IN_ANY_ORDER)
