"""Many small matrices at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tnlib._typing import Array
from tnlib.linalg import threads

R = TypeVar("R")


@threads.own_threads
def each(function: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> list[R]:
    """Return function(*one) for every one of `arguments`, spread over threads, in their order.

    A factorisation of a small matrix gains nothing from the threads of BLAS, and often loses a lot; many of them
    side by side gain what there is to gain.
    """
    results: list[Any] = [None] * len(arguments)

    def work(first: int, last: int) -> None:
        for k in range(first, last):
            results[k] = function(*arguments[k])

    threads.spread(work, threads.cut(len(arguments), threads.count()))
    return results


@threads.own_threads
def svd_each(a: Array) -> tuple[Array, Array, Array]:
    """Return u (h, m, k), s (h, k), vh (h, k, n) of every matrix of `a` (h, m, n); signs are LAPACK's."""
    parts = threads.cut(len(a), threads.count())
    found: list[Any] = [None] * len(parts)

    def work(number: int, first: int, last: int) -> None:
        found[number] = np.linalg.svd(a[first:last], full_matrices=False)

    threads.spread(work, [(k, *part) for k, part in enumerate(parts)])
    u, s, vh = (np.concatenate([part[k] for part in found]) for k in range(3))
    return u, s, vh
