"""Map a function of small matrices over threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tnlib.linalg.threads import run_parallel, single_threaded_blas, split_range, thread_count

R = TypeVar("R")


@single_threaded_blas
def parallel_map(function: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> list[R]:
    """Return function(*a) for every tuple `a` of `arguments`, in their order.

    A factorization of a small matrix does not run faster on several threads of BLAS, and often slower; several of them
    in parallel do.
    """
    results: list[Any] = [None] * len(arguments)

    def work(first: int, last: int) -> None:
        for k in range(first, last):
            results[k] = function(*arguments[k])

    run_parallel(work, split_range(len(arguments), thread_count()))
    return results
