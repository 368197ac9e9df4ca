"""Many small matrices at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
