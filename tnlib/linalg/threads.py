"""How many threads the library may use, and work spread over them.

Threads of BLAS go on spinning for a while after a product, in the way of other threads, and for small matrices they
cost more than they give. So a decomposition asks BLAS to use one thread while it runs and spreads what is large over
threads of its own, as many as BLAS was allowed: that is where environment variables and threadpoolctl have their say.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tnlib._typing import Array

P = ParamSpec("P")
R = TypeVar("R")

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LARGE = 1 << 24  # multiplications; a product with fewer is done before threads have started


class _Owner:
    """What BLAS was allowed before calls of ours, which may overlap, asked it to use one thread."""

    lock = threading.RLock()
    calls = 0
    given = 1  # what BLAS says
    allowed = 1  # as many of these as there are cores
    pool: ThreadPoolExecutor | None = None
    inside = threading.local()  # .pool is True in a thread of the pool


def own_threads(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` with BLAS on one thread; `spread` and `matmul` use the others."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _blas_on_one_thread():
            return function(*args, **kwargs)

    return run


@contextmanager
def blas_threads() -> Iterator[None]:
    """Give BLAS its threads back for one large LAPACK call."""
    if not _Owner.calls or getattr(_Owner.inside, "pool", False):
        yield
        return
    _ask_blas_for(_Owner.allowed)
    try:
        yield
    finally:
        with _Owner.lock:
            if _Owner.calls:
                _ask_blas_for(1)


def count() -> int:
    """Return how many threads BLAS may use, limits of the environment and of threadpoolctl included."""
    if _Owner.calls:
        return _Owner.allowed
    return max(1, min(_given(), _cores()))


def spread(work: Callable[..., object], pieces: Sequence[tuple[Any, ...]]) -> None:
    """Call `work(*piece)` for every piece, side by side; `work` must let go of the GIL.

    From inside such work the pieces are done one after the other: threads that wait for threads of the same pool would
    wait for ever.
    """
    if len(pieces) <= 1 or getattr(_Owner.inside, "pool", False):
        for piece in pieces:
            work(*piece)
        return
    with _Owner.lock:
        if _Owner.pool is None:
            _Owner.pool = ThreadPoolExecutor(max(1, _cores()), "tnlib", initializer=_enter_pool)
        pool = _Owner.pool
    others = [pool.submit(work, *piece) for piece in pieces[1:]]
    try:
        work(*pieces[0])  # the caller's own thread does not wait idle
    finally:
        wait(others)
    for other in others:
        other.result()


def cut(n: int, parts: int, *, multiple: int = 1) -> list[tuple[int, int]]:
    """Return at most `parts` ranges that cover 0 ... n, nearly equal, bounded by multiples of `multiple`.

    >>> cut(10, 2, multiple=4)
    [(0, 4), (4, 10)]
    """
    edges = sorted({n * part // parts // multiple * multiple for part in range(parts)} | {n})
    return list(itertools.pairwise(edges))


def matmul(a: Array, b: Array) -> Array:
    """Return a @ b, (m, k) times (k, n); a large one in pieces, each by one thread of BLAS."""
    m, n, parts = a.shape[0], b.shape[1], count()
    if parts == 1 or m * n * a.shape[1] < _LARGE or not _Owner.calls:
        return np.asarray(a @ b)
    out = np.empty((m, n), np.result_type(a, b))
    if m >= n:
        spread(np.matmul, [(a[i:j], b, out[i:j]) for i, j in cut(m, parts, multiple=8)])
    else:
        spread(np.matmul, [(a, b[:, i:j], out[:, i:j]) for i, j in cut(n, parts, multiple=8)])
    return out


@contextmanager
def _blas_on_one_thread() -> Iterator[None]:
    if getattr(_Owner.inside, "pool", False):  # a call from inside a call
        yield
        return
    with _Owner.lock:
        if _Owner.calls == 0:
            _Owner.given, _Owner.allowed = _given(), count()
            _ask_blas_for(1)
        _Owner.calls += 1
    try:
        yield
    finally:
        with _Owner.lock:
            _Owner.calls -= 1
            if _Owner.calls == 0:
                _ask_blas_for(_Owner.given)


def _forget_threads() -> None:
    """In a forked child: threads do not survive a fork, nor do their calls, and they may have held the lock."""
    _Owner.lock, _Owner.pool = threading.RLock(), None
    if _Owner.calls:
        _Owner.calls = 0
        _ask_blas_for(_Owner.given)


def _enter_pool() -> None:
    _Owner.inside.pool = True


def _given() -> int:
    library = _blas()
    return int(library.num_threads) if library is not None else _from_environment()


def _ask_blas_for(threads: int) -> None:
    """Set the count of threads of BLAS, from whatever thread.

    Of OpenBLAS the plain call is without effect in other threads than the first one that made it; its newer sibling is
    not, whose name says less than it does.
    """
    library = _blas()
    if library is None or library.num_threads == threads:
        return
    anywhere = getattr(library.dynlib, "openblas_set_num_threads_local", None)
    (library.set_num_threads if anywhere is None else anywhere)(threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@functools.cache
def _blas() -> Any:
    """Return threadpoolctl's handle on the BLAS that numpy loaded; reading its count takes a microsecond."""
    from threadpoolctl import ThreadpoolController

    found = [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]
    ours = [library for library in found if "numpy" in str(library.filepath)]
    return (ours or found or [None])[0]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _from_environment() -> int:
    """For a BLAS that threadpoolctl does not know."""
    asked = [int(value) for name in _VARIABLES if (value := os.environ.get(name, "")).isdigit()]
    return min(asked, default=_cores())
