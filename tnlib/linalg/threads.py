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
from concurrent.futures import ThreadPoolExecutor
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
    allowed = 1
    pool: ThreadPoolExecutor | None = None


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
    library, allowed = _blas(), count()
    with _Owner.lock:
        if library is not None and _Owner.calls:
            library.set_num_threads(allowed)
    try:
        yield
    finally:
        with _Owner.lock:
            if library is not None and _Owner.calls:
                library.set_num_threads(1)


def count() -> int:
    """Return how many threads BLAS may use, limits of the environment and of threadpoolctl included."""
    if _Owner.calls:
        return _Owner.allowed
    library = _blas()
    allowed = library.num_threads if library is not None else _from_environment()
    return max(1, min(int(allowed), _cores()))


def spread(work: Callable[..., object], pieces: Sequence[tuple[Any, ...]]) -> None:
    """Call `work(*piece)` for every piece, side by side; `work` must let go of the GIL."""
    if len(pieces) > 1:
        with _Owner.lock:
            if _Owner.pool is None:
                _Owner.pool = ThreadPoolExecutor(max(1, _cores()), thread_name_prefix="tnlib")
            pool = _Owner.pool
        others = [pool.submit(work, *piece) for piece in pieces[1:]]
        work(*pieces[0])  # the caller's own thread does not wait idle
        for other in others:
            other.result()
    elif pieces:
        work(*pieces[0])


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
    library = _blas()
    with _Owner.lock:
        if _Owner.calls == 0:
            _Owner.allowed = count()
            if library is not None and _Owner.allowed > 1:
                library.set_num_threads(1)
        _Owner.calls += 1
    try:
        yield
    finally:
        with _Owner.lock:
            _Owner.calls -= 1
            if _Owner.calls == 0 and library is not None and _Owner.allowed > 1:
                library.set_num_threads(_Owner.allowed)


def _forget_threads() -> None:
    """In a forked child: threads do not survive a fork, and the lock may be held by one that is gone."""
    _Owner.lock, _Owner.pool = threading.RLock(), None


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
