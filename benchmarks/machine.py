"""What this machine can do, measured on the spot, and what each case must cost on it at least."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from benchmarks.cases import Case

LIBRARIES = ("numpy", "scipy", "numba", "quimb", "physics-tenpy", "tensorly", "teneva", "torchTT", "torch", "pyttb",
             "scikit-learn")  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Best of several; flops and bytes per second on as many threads as BLAS uses."""

    gemm64: float
    gemm32: float
    read: float


def measure(scale: str) -> dict[str, Any]:
    """Return the machine as a reader needs to know it: no names of hosts, users or folders."""
    blas = blas_in_use()
    rates = Rates(gemm64=_gemm(np.float64, scale), gemm32=_gemm(np.float32, scale), read=_read(blas["threads"], scale))
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "blas": blas,
        "python": platform.python_version(),
        "rates": asdict(rates),
        "versions": {name: found for name in LIBRARIES if (found := _version(name))},
    }


def measured_on() -> str:
    """Return date, commit, processor and versions in one sentence, for the head of a table."""
    commit = subprocess.run(("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False)
    versions = ", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name)))
    return (
        f"Measured on {datetime.date.today()} at commit {commit.stdout.strip() or 'unknown'}, on {cpu_name()}, "
        f"{os.cpu_count()} cores, with Python {platform.python_version()}, {versions}."
    )


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def blas_in_use() -> dict[str, Any]:
    """Name, version and threads of the BLAS that numpy calls."""
    np.ones((2, 2)) @ np.ones((2, 2))
    found = ThreadpoolController().select(user_api="blas").info()
    ours = [one for one in found if "numpy" in one["filepath"]] or found
    if not ours:
        return {"name": "unknown", "version": "", "threads": os.cpu_count() or 1}
    return {"name": ours[0]["internal_api"], "version": ours[0]["version"], "threads": ours[0]["num_threads"]}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ModuleNotFoundError:
        return None


def _best(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest round; the first one warms up and is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _gemm(dtype: type, scale: str) -> float:
    n = 512 if scale == "small" else 3072
    a = np.random.default_rng(0).standard_normal((n, n)).astype(dtype)
    out = np.empty_like(a)
    return 2 * n**3 / _best(lambda: np.matmul(a, a, out=out), rounds=5)


def _read(threads: int, scale: str) -> float:
    """Sum of squares of an array far larger than any cache, a part for each thread."""
    x = np.ones((1 << 23) if scale == "small" else (1 << 27))
    parts = np.array_split(x, threads)
    with ThreadPoolExecutor(threads) as pool, ThreadpoolController().limit(limits=1, user_api="blas"):
        return x.nbytes / _best(lambda: list(pool.map(lambda part: part @ part, parts)), rounds=7)


@dataclass(frozen=True)
class Bound:
    """Seconds that a case takes at the measured rates, reading and arithmetic one after the other."""

    reading: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        return self.reading + self.arithmetic


def bound(case: Case, rates: Rates) -> Bound:
    _, count = FORMULAS[case.name]
    n_bytes, flops = count(case)
    single = case.name in ("svd", "heads", "composition")
    return Bound(n_bytes / rates.read, flops / (rates.gemm32 if single else rates.gemm64))


def _train_cost(case: Case) -> tuple[float, float]:
    n, r = case.n_entries, case.rank
    return 2 * 8 * n, 4 / 3 * n * (4 * r + 2 * r)


def _tucker_cost(case: Case) -> tuple[float, float]:
    n, r, leg = case.n_entries, case.rank, case.shape[0]
    return 2 * 8 * n, n * (leg + 2 * r) / (1 - r / leg)


def _svd_cost(case: Case) -> tuple[float, float]:
    return 2 * 4 * case.n_entries, 4 * case.n_entries * case.rank


def _round_cost(case: Case) -> tuple[float, float]:
    d, n, r = len(case.shape), case.shape[0], case.rank
    bond = 2 * r
    return 2 * 8 * d * bond * n * bond, d * n * (3 * bond**3 + 2 * r * bond**2 + 2 * r**2 * bond)


def _inner_cost(case: Case) -> tuple[float, float]:
    d, n, r = len(case.shape), case.shape[0], case.rank
    return 2 * 8 * d * n * r**2, 4 * d * n * r**3


def _apply_cost(case: Case) -> tuple[float, float]:
    d, n, r, bond = len(case.shape), case.shape[0], case.rank, 4
    contraction = 2 * n * (bond * r) * r * (r + n * bond)
    return 8 * d * (n**2 * bond**2 + n * r**2), d * (2 * contraction + 2 * (n * r) ** 2 * bond * r)


def _cross_cost(case: Case) -> tuple[float, float]:
    d, n, r = len(case.shape), case.shape[0], case.rank
    return 8 * d * n * r**2, 2 * d * n * r**3


def _sum_cost(case: Case) -> tuple[float, float]:
    d, n, r, terms = len(case.shape), case.shape[0], case.rank, 20
    return 8 * terms * d * n * r**2, 2 * terms * d * n * r**3


def _heads_cost(case: Case) -> tuple[float, float]:
    heads, d, r = case.shape
    return 4 * 4 * heads * d * r, 2 * heads * 12 * d * r**2


def _composition_cost(case: Case) -> tuple[float, float]:
    layers, heads, d, r = case.shape
    pairs = heads**2 * layers * (layers - 1) / 2
    return 4 * 4 * layers * heads * d * r, 2 * layers * heads * 4 * d * r**2 + pairs * 2 * d * r**2


_TRAIN_WORDS = (
    "read twice; Gram matrix of blocks of width 4r (4r flops per entry, by symmetry) and projection on r vectors (2r); "
    "each step leaves a quarter of the entries, a factor of 4/3 in all"
)
_TUCKER_WORDS = (
    "read twice; Gram matrix of the first mode (n flops per entry, by symmetry) and projection on r of n vectors (2r); "
    "each mode leaves r/n of the entries, a factor of 1/(1 - r/n) in all"
)

# case -> the formula in words, and the case's (bytes read, flops)
FORMULAS: dict[str, tuple[str, Callable[[Case], tuple[float, float]]]] = {
    "tt24": (_TRAIN_WORDS, _train_cost),
    "tt32": (_TRAIN_WORDS, _train_cost),
    "tt20": (_TRAIN_WORDS, _train_cost),
    "tucker4": (_TUCKER_WORDS, _tucker_cost),
    "tucker3": (_TUCKER_WORDS, _tucker_cost),
    "cp3": (f"compression to the Tucker core of ranks R only: {_TUCKER_WORDS}", _tucker_cost),
    "svd": ("read twice; one product with r random vectors and one projection (4r flops per entry)", _svd_cost),
    "round": (
        "read twice; one sweep of Gram matrices (3 n R^3 flops per core of bonds R) and one sweep of "
        "truncations (2 n r R^2 + 2 n r^2 R)",
        _round_cost,
    ),
    "inner": ("both operands read once; two products per core (4 n r^3 flops)", _inner_cost),
    "add": (
        "the sum read twice; one sweep of Gram matrices (3 n R^3 flops per core of bonds R) and one sweep of "
        "truncations (2 n r R^2 + 2 n r^2 R)",
        _round_cost,
    ),
    "apply": (
        "both operands read once; two sweeps that multiply r vectors by a core of the operator and a core of the "
        "train (2 n R r (r + n R/r) flops, R = 4 r), and one triangular factor of an n r x R matrix per core "
        "(2 n^2 r^2 R)",
        _apply_cost,
    ),
    "cross": ("n r^2 entries of every core read once; one factorisation of each (2 n r^3 flops)", _cross_cost),
    "sum": ("every term read once; one product of each core with r columns (2 n r^3 flops)", _sum_cost),
    "heads": (
        "every factor read once; for each a QR with its isometric factor (4 d r^2 flops) and a product with an r x r "
        "matrix (2 d r^2)",
        _heads_cost,
    ),
    "composition": (
        "every factor read once; for each operator one triangular factor (2 d r^2 flops) and a product with it "
        "(2 d r^2), for each pair a product of r x d with d x r (2 d r^2)",
        _composition_cost,
    ),
}
