"""Thread limits of BLAS, and work distributed over threads.

The threads of BLAS keep spinning for a while after a product and slow other threads down, and on small matrices they
cost more than they gain. A decomposition therefore limits BLAS to one thread while it runs, and distributes large work
over a pool of its own with as many threads as BLAS was allowed, so that environment variables and threadpoolctl apply.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tnlib._typing import Array

P = ParamSpec("P")
R = TypeVar("R")

_LARGE = 1 << 24  # multiplications; a smaller product ends before threads have started
_UNTHREADED = 1 << 10  # entries; the smaller side of a matrix of them is at most 32, the block size of LAPACK


class _ThisThread(threading.local):
    in_pool = False  # True in threads of our pool
    in_one_piece = False  # True inside of `work_in_one_piece`


class _ThreadState:
    """Calls of `single_threaded_blas` functions that are running, which may overlap, and the limit before the first."""

    lock = threading.RLock()
    n_calls = 0
    limit = 1
    jobs: SimpleQueue[tuple[Any, ...]] = SimpleQueue()  # of all threads of the pool
    n_workers = 0
    this_thread = _ThisThread()


def single_threaded_blas(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with BLAS limited to one thread; `run_parallel` and `parallel_matmul` use all of them."""
    return _single_threaded(function, 0)


def single_threaded_blas_of_large(function: Callable[P, R]) -> Callable[P, R]:
    """Return `single_threaded_blas(function)` that leaves BLAS as it is for an array of at most 1024 entries.

    Neither a thin SVD nor a product of such arrays starts a thread: OpenBLAS uses one up to 2^18 multiplications, and
    LAPACK multiplies by blocks of reflectors from 33 columns on. The two changes of the limit would cost 6 us.
    """
    return _single_threaded(function, _UNTHREADED)


def _single_threaded(function: Callable[P, R], n_small: int) -> Callable[P, R]:
    """Return `function` with BLAS limited to one thread, unless its first argument is an array of `n_small` entries."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if n_small and args and type(args[0]) is np.ndarray and args[0].size <= n_small:
            return function(*args, **kwargs)
        if _ThreadState.this_thread.in_pool:  # a call from inside a call
            return function(*args, **kwargs)
        with _ThreadState.lock:
            if _ThreadState.n_calls == 0:
                _ThreadState.limit = _set_blas_threads(1)
            _ThreadState.n_calls += 1
        try:
            return function(*args, **kwargs)
        finally:
            with _ThreadState.lock:
                _ThreadState.n_calls -= 1
                if _ThreadState.n_calls == 0 and _ThreadState.limit != 1:
                    _set_blas_threads(_ThreadState.limit)

    return run


@contextmanager
def all_blas_threads() -> Iterator[None]:
    """Lift the limit of `single_threaded_blas` for one large LAPACK call."""
    if not _ThreadState.n_calls or _ThreadState.this_thread.in_pool:
        yield
        return
    _set_blas_threads(thread_count())
    try:
        yield
    finally:
        with _ThreadState.lock:
            if _ThreadState.n_calls:
                _set_blas_threads(1)


@contextmanager
def single_threaded_scipy() -> Iterator[None]:
    """Limit the BLAS of scipy, a library of its own in wheels, to one thread.

    Where calls to both libraries alternate, the spinning threads of one stop the other: ARPACK on vectors of 3600
    complex numbers, with products by numpy, took 16 s on two cores and 0.5 s with this limit.
    """
    previous = _set_blas_threads(1, "scipy")
    try:
        yield
    finally:
        _set_blas_threads(previous, "scipy")


@contextmanager
def work_in_one_piece() -> Iterator[None]:
    """Use one thread in the block, so that no sum depends on the number of cores; other threads are not affected."""
    this = _ThreadState.this_thread
    previous = this.in_pool, this.in_one_piece
    this.in_pool = this.in_one_piece = True
    try:
        yield
    finally:
        this.in_pool, this.in_one_piece = previous


def thread_count() -> int:
    """Return the number of threads that BLAS may use, limits of the environment and of threadpoolctl included."""
    if _ThreadState.this_thread.in_one_piece:
        return 1
    if _ThreadState.n_calls:
        allowed = _ThreadState.limit
    else:
        library = _blas("numpy")
        allowed = _threads_of_environment() if library is None else int(library.num_threads)
    return max(1, min(allowed, _core_count()))


def run_parallel(work: Callable[..., object], pieces: Sequence[tuple[Any, ...]]) -> None:
    """Call `work(*piece)` for every piece, in parallel; `work` must release the GIL.

    Called from inside such work it runs the pieces one after the other: threads of a pool that wait for other threads
    of the pool would deadlock.
    """
    if len(pieces) <= 1 or _ThreadState.this_thread.in_pool:
        for piece in pieces:
            work(*piece)
        return
    with _ThreadState.lock:
        while _ThreadState.n_workers < len(pieces) - 1 and _ThreadState.n_workers < _core_count():
            threading.Thread(target=_serve, args=(_ThreadState.jobs,), name="tnlib", daemon=True).start()
            _ThreadState.n_workers += 1
        jobs = _ThreadState.jobs
    results: SimpleQueue[BaseException | None] = SimpleQueue()
    for piece in pieces[1:]:
        jobs.put((results, work, piece))
    try:
        work(*pieces[0])  # in the caller's own thread
    finally:
        problems = [results.get() for _ in pieces[1:]]
    for problem in problems:
        if problem is not None:
            raise problem


def _serve(jobs: SimpleQueue[tuple[Any, ...]]) -> None:
    """Do jobs as they come; a future and its condition would take three times as long to start and to wait for."""
    _ThreadState.this_thread.in_pool = True
    while True:
        results, work, piece = jobs.get()
        try:
            work(*piece)
        except BaseException as problem:
            results.put(problem)
        else:
            results.put(None)
        del results, work, piece  # not kept until the next job


def split_range(n: int, parts: int, *, multiple: int = 1) -> list[tuple[int, int]]:
    """Return at most `parts` ranges that cover 0 ... n, nearly equal, bounded by multiples of `multiple`.

    >>> split_range(10, 2, multiple=4)
    [(0, 4), (4, 10)]
    """
    edges = sorted({n * part // parts // multiple * multiple for part in range(parts)} | {n})
    return list(itertools.pairwise(edges))


def parallel_matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a @ b, (m, k) times (k, n); a large one in blocks of rows or columns, one thread of BLAS for each.

    The result is written to `out` (m, n) if given, which spares the pages of a new array for each of many products.
    """
    m, n = a.shape[0], b.shape[1]
    if not _ThreadState.n_calls or m * n * a.shape[1] < _LARGE or (parts := thread_count()) == 1:
        return np.asarray(np.matmul(a, b, out=out))
    out = np.empty((m, n), np.result_type(a, b)) if out is None else out
    if m >= n:
        run_parallel(np.matmul, [(a[i:j], b, out[i:j]) for i, j in split_range(m, parts, multiple=8)])
    else:
        run_parallel(np.matmul, [(a, b[:, i:j], out[:, i:j]) for i, j in split_range(n, parts, multiple=8)])
    return out


def _reset_after_fork() -> None:
    """Drop the state in a forked child: neither threads nor their calls survive a fork, and one may hold the lock."""
    _ThreadState.lock, _ThreadState.jobs, _ThreadState.n_workers = threading.RLock(), SimpleQueue(), 0
    if _ThreadState.n_calls:
        _ThreadState.n_calls = 0
        _set_blas_threads(_ThreadState.limit)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def _set_blas_threads(count: int, package: str = "numpy") -> int:
    """Set the number of threads of the BLAS of `package` and return the previous one."""
    return _thread_setter(package)(count)


@functools.cache
def _thread_setter(package: str) -> Callable[[int], int]:
    library = _blas(package)
    if library is None:
        return lambda _: _threads_of_environment()
    # OpenBLAS ignores the plain setter in all threads but the first that called it; despite its name, the local one
    # works from every thread and for all of them, and returns the previous count.
    set_from_any_thread: Callable[[int], int] | None = getattr(library.dynlib, "openblas_set_num_threads_local", None)
    if set_from_any_thread is not None:
        return set_from_any_thread

    def set_threads(count: int) -> int:
        previous = int(library.num_threads)
        library.set_num_threads(count)
        return previous

    return set_threads


@functools.cache
def _blas(package: str) -> Any:
    """Return threadpoolctl's handle on the BLAS with `package` in its path, else on the first one, None without any."""
    from threadpoolctl import ThreadpoolController

    libraries = [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]
    return next((library for library in libraries if package in str(library.filepath)), next(iter(libraries), None))


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads_of_environment() -> int:
    """Return the limit that environment variables set, for a BLAS that threadpoolctl does not know."""
    values = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")]
    return min((int(value) for value in values if value.isdigit()), default=_core_count())
