"""Threads: as many as BLAS was allowed, restored afterwards, beside other threads and after a fork."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import threadpoolctl
from slow_cases import mostly_slow

import tnlib
from tnlib.linalg import threads

ROOT = Path(__file__).resolve().parents[3]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def run(script: str, **variables: str) -> str:
    """Run `script` in a process of its own, the environment's limits on threads replaced by `variables`."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", script],
        env=kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])} | variables,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def blas_counts() -> dict[str, int]:
    """Threads of every BLAS that is loaded."""
    info = threadpoolctl.threadpool_info()
    return {library["filepath"]: library["num_threads"] for library in info if library["user_api"] == "blas"}


def assert_restored(before: dict[str, int]) -> None:
    """Libraries that were loaded before have their threads; numba may have loaded another BLAS since."""
    assert before == {path: count for path, count in blas_counts().items() if path in before}


@functools.cache
def large() -> np.ndarray:
    """Large enough for threads of our own: sums of squares, Gram kernels and products are spread."""
    return oracles.random_train((64, 64, 512), [1, 6, 6, 1]) + 1e-6 * oracles.normal((64, 64, 512), seed=1) / 1448


CALLS: dict[str, Callable[[np.ndarray], Any]] = {
    "tt_svd": lambda x: tnlib.tt_svd(x, rtol=1e-4),
    "exact tt_svd": lambda x: tnlib.tt_svd(x[:2], rtol=1e-12, max_rank=8),
    "ttm_svd": lambda x: tnlib.ttm_svd(x.reshape(64 * 64, 512), (64, 64), (16, 32), rtol=1e-4),
    "tucker": lambda x: tnlib.tucker(x, rtol=1e-4),
    "svd": lambda x: tnlib.svd(x.reshape(2048, -1)[:, :600].copy(), max_rank=10),
    "cp": lambda x: tnlib.cp(x, 3, n_iter=2),
    "round": lambda x: tnlib.round(tnlib.TensorTrain(oracles.random_cores((30,) * 4, (1, 40, 40, 40, 1))), rtol=0.1),
}


# ----------------------------------------------------------------------------------------------------- the count


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("user_api", [None, "blas"])
def test_the_count_follows_threadpoolctl(limit: int, user_api: str | None) -> None:
    with threadpoolctl.threadpool_limits(limit, user_api=user_api):
        assert threads.thread_count() == min(limit, CORES)


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"OPENBLAS_NUM_THREADS": "1"}, 1),
        ({"OPENBLAS_NUM_THREADS": "2"}, min(2, CORES)),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({}, CORES),
    ],
    ids=str,
)
def test_the_count_follows_the_environment(variables: dict[str, str], want: int) -> None:
    script = "from tnlib.linalg import threads; print(threads.thread_count())"
    assert int(run(script, **variables)) == want


# --------------------------------------------------------------------------------------------- limited and restored


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_blas_has_its_threads_back_after_an_exception(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with threadpoolctl.threadpool_limits(limit, user_api="blas"):
        before = blas_counts()
        for call in (lambda: tnlib.tt_svd(np.full((3, 3), np.nan)), lambda: tnlib.cp(np.ones((2, 2)), 0)):
            with pytest.raises(ValueError, match="must be"):
                call()
            assert_restored(before)
        monkeypatch.setattr(np.linalg, "eigh", interrupted)
        monkeypatch.setattr(np.linalg, "svd", interrupted)
        for call in (lambda: tnlib.tt_svd(np.ones((20, 20, 20))), lambda: tnlib.svd(np.ones((5, 5)))):
            with pytest.raises(KeyboardInterrupt):
                call()
            assert_restored(before)
        assert threads.thread_count() == min(limit, CORES)


# ----------------------------------------------------------------------------------------------- beside other threads


@pytest.mark.parametrize("failing", [0, 2])  # a piece of the caller's own thread, and one of another
def test_an_exception_in_parallel_work_comes_after_all_pieces(failing: int) -> None:
    done = []

    def work(piece: int) -> None:
        if piece == failing:
            raise ValueError(f"piece {piece}")
        time.sleep(0.01 * piece)
        done.append(piece)

    pieces = [(k,) for k in range(5)]
    for _ in range(2):  # no thread of the pool ended
        done.clear()
        with pytest.raises(ValueError, match=f"piece {failing}"):
            threads.run_parallel(work, pieces)
        assert sorted(done) == [k for k in range(5) if k != failing]
    threads.run_parallel(done.append, [(k,) for k in range(5, 9)])
    assert sorted(done)[-4:] == [5, 6, 7, 8]


@pytest.mark.parametrize("name", mostly_slow(CALLS, ["tt_svd", "svd"]))
def test_one_thread_and_two_agree_and_blas_has_its_threads_back(name: str) -> None:
    x = large()
    results = []
    for limit in (1, 2):
        with threadpoolctl.threadpool_limits(limit, user_api="blas"):
            before = blas_counts()
            fit, _ = oracles.quietly(lambda: CALLS[name](x))
            again, _ = oracles.quietly(lambda: CALLS[name](x))
            assert_restored(before)
        oracles.assert_same_bits(fit.value, again.value)
        results.append(fit)
    one, two = results
    assert one.value.ranks == two.value.ranks
    assert one.error == pytest.approx(two.error, rel=0.05, abs=1e-13)
    oracles.assert_close(two.value.full(), one.value.full(), factor=(64 + 2.2 * one.error / oracles.eps(np.float64)))


COMMON = """
import os, sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor
warnings.simplefilter("ignore")  # of forks beside threads, from Python 3.12 on
import numpy as np
import threadpoolctl, oracles, tnlib
from tnlib.linalg import threads

def blas():  # threads of numpy's; a kernel loads scipy's as well
    return next((info["num_threads"] for info in threadpoolctl.threadpool_info() if "numpy" in info["filepath"]), None)

x = oracles.random_train((64, 64, 512), [1, 6, 6, 1]) + 1e-6 * oracles.normal((64, 64, 512), seed=1) / 1448
"""

# In a process whose BLAS has two threads from the start: limits of threadpoolctl belong to one Python thread.
BESIDE = (
    COMMON
    + """
if len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)) < 2 or blas() is None:
    sys.exit(0)

def start(function):
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()
    def body():
        function(entered, leave)
        left.set()
        threading.Event().wait()  # as a thread of a pool, it lives on
    threading.Thread(target=body, daemon=True).start()
    assert entered.wait(60)
    return leave, left

@threads.single_threaded_blas
def a_call(entered, leave):
    counts.append(blas())
    entered.set()
    assert leave.wait(60)

counts = []
"""
)


@pytest.mark.slow
def test_calls_from_several_threads_at_once() -> None:
    script = """
calls = [
    lambda: tnlib.tt_svd(x, rtol=1e-4),
    lambda: tnlib.ttm_svd(x.reshape(4096, 512), (64, 64), (16, 32), rtol=1e-4),
    lambda: tnlib.svd(x.reshape(2048, -1)[:, :600].copy(), max_rank=10),
    lambda: tnlib.cp(x[:32], 3, n_iter=2),
]
want = [call() for call in calls]
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda k: calls[k % 4](), range(12)))
assert blas() == threads.thread_count() == 2
for k, fit in enumerate(found):  # LAPACK may have had one thread or two, and rounded otherwise
    assert fit.value.ranks == want[k % 4].value.ranks
    assert abs(fit.error - want[k % 4].error) <= 1e-3 * want[k % 4].error + 1e-13
"""
    run(BESIDE + script, OPENBLAS_NUM_THREADS="2")


@pytest.mark.slow
@pytest.mark.parametrize("first_to_leave", ["first", "second"])
def test_calls_that_overlap_restore_the_count_once_the_last_one_ends(first_to_leave: str) -> None:
    script = """
calls = [start(a_call), start(a_call)]
tnlib.tt_svd(x, rtol=1e-3)
assert blas() == 1, blas()
for leave, left in calls[::ORDER]:
    assert threads.thread_count() == 2
    leave.set()
    assert left.wait(60)
assert blas() == threads.thread_count() == 2, blas()
""".replace("ORDER", "1" if first_to_leave == "first" else "-1")
    run(BESIDE + script, OPENBLAS_NUM_THREADS="2")


@pytest.mark.slow
def test_a_call_from_any_thread_asks_blas_for_one_thread() -> None:
    """Threadpoolctl lets one Python thread set limits, the first that does, and ignores the others without a word."""
    script = """
tnlib.tt_svd(x, rtol=1e-3)
for _ in range(2):
    leave, left = start(a_call)
    leave.set()
    assert left.wait(60)
assert counts == [1, 1], counts
assert blas() == 2
with threadpoolctl.threadpool_limits(1):  # of the user, afterwards
    assert blas() == threads.thread_count() == 1
    tnlib.tt_svd(x, rtol=1e-3)
    assert blas() == 1
assert blas() == 2
"""
    run(BESIDE + script, OPENBLAS_NUM_THREADS="2")


FORK = (
    COMMON
    + """
def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as problem:
            print(repr(problem), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        sys.exit("the child hangs")
    assert status == 0
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
want = tnlib.tt_svd(x, rtol=1e-4)
workers = [thread.name for thread in threading.enumerate() if thread.name.startswith("tnlib")]
assert threads.thread_count() == 1 or workers, "the parent has used its pool"
before = blas()

def work():
    got = tnlib.tt_svd(x, rtol=1e-4)
    oracles.assert_same_bits(got.value, want.value)
    assert got.error == want.error
    assert blas() == before
    tnlib.tucker(x, rtol=1e-4)

in_child(work)
in_child(lambda: in_child(work))
oracles.assert_same_bits(tnlib.tt_svd(x, rtol=1e-4).value, want.value)
assert blas() == before
"""
    run(FORK + script, OPENBLAS_NUM_THREADS="2")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_a_child_forked_beside_a_running_call_has_its_threads_back() -> None:
    """The call goes on in the parent alone; the child must not wait for its end, nor stay on one thread for ever."""
    script = """
before = blas()
entered, leave = threading.Event(), threading.Event()

@threads.single_threaded_blas
def long():
    entered.set()
    leave.wait(60)

other = threading.Thread(target=long)
other.start()
assert entered.wait(60)

def work():
    got = tnlib.tt_svd(x, rtol=1e-4)
    assert got.error < 1e-4
    assert blas() == before, f"{blas()} threads, not {before}"

try:
    in_child(work)
finally:
    leave.set()
    other.join()
assert blas() == before
"""
    run(FORK + script, OPENBLAS_NUM_THREADS="2")


# ----------------------------------------------------------------------------------------------------- start-up


def test_small_arrays_load_neither_numba_nor_scipy() -> None:
    script = """
import sys
import tnlib
import numpy as np
x = np.random.default_rng(0).standard_normal((6, 7, 8))
tnlib.tt_svd(x, rtol=0.1)
tnlib.tt_svd(x)
tnlib.ttm_svd(x.reshape(6, 56), (2, 3), (7, 8), rtol=0.1)
tnlib.tucker(x, rtol=0.1, n_iter=2)
tnlib.cp(x, 2, rtol=0.95)
tnlib.svd(x, left=0, max_rank=2)
tnlib.round(tnlib.tt_svd(x).value, rtol=0.1)
loaded = [name for name in ("numba", "scipy", "quimb", "tensorly", "matplotlib", "torch") if name in sys.modules]
assert not loaded, loaded
"""
    run(script)
