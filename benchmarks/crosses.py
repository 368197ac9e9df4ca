"""The registry's part on functions of indices and on sums of many trains; and how often each library asks a function.

    python -m benchmarks.crosses

prints, for functions of up to a hundred indices, how many points each library asks for and the error that this buys.
"""

from __future__ import annotations

import importlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cases import Case, Many
from benchmarks.entry import Entry, resolve, tnlib_cores, torch_train, unchanged

Function = Callable[[np.ndarray], np.ndarray]

# ---- function of indices -> train


def tnlib_cross(tt_cross: Any, f: Function, shape: Sequence[int], rtol: float) -> Any:
    return tt_cross(f, shape, rtol=rtol)


def teneva_cross(cross: Any, f: Function, shape: Sequence[int], rtol: float) -> Any:
    start = resolve("teneva:rand")(list(shape), 1, seed=0)
    cores = cross(lambda points: f(np.asarray(points)), start, e=rtol, m=2_000_000, cache={})
    return resolve("teneva:truncate")(cores, rtol / 10)


def torch_cross(dmrg_cross: Any, f: Function, shape: Sequence[int], rtol: float) -> Any:
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    return dmrg_cross(lambda points: torch.from_numpy(f(points.numpy())), list(shape), eps=rtol)


def _lookup(solve: Callable[..., Any]) -> Callable[[Any, np.ndarray, Case], Any]:
    return lambda function, x, case: solve(function, lambda points: x[tuple(points.T)], x.shape, case.rtol)


CROSS = (
    Entry("tnlib", "tnlib:tt_cross", _lookup(tnlib_cross), tnlib_cores, "tt_cross(f, shape, rtol=rtol)"),
    Entry(
        "teneva",
        "teneva:cross",
        _lookup(teneva_cross),
        unchanged,
        "cross(f, rand(shape, 1), e=rtol, cache={}); followed by truncate(cores, rtol / 10)",
    ),
    Entry(
        "torchTT",
        "torchtt.interpolate:dmrg_cross",
        _lookup(torch_cross),
        lambda train: train.cores,
        "interpolate.dmrg_cross(f, shape, eps=rtol)",
    ),
)

# ---- many trains -> their sum


def _trains(many: Many, _: Case) -> list[Any]:
    return [resolve("tnlib:TensorTrain")(cores) for cores in many.a]


def _sum(trains: Sequence[Any]) -> Any:
    total = trains[0]
    for train in trains[1:]:
        total = total + train
    return total


SUM = (
    Entry(
        "tnlib",
        "tnlib:round_randomized",
        lambda round_randomized, trains, case: round_randomized(trains, rtol=case.rtol),
        tnlib_cores,
        "round_randomized(trains, rtol=rtol)",
        prepare=_trains,
    ),
    Entry(
        "tnlib, formed",
        "tnlib:round",
        lambda round, trains, case: round(_sum(trains), rtol=case.rtol),
        tnlib_cores,
        "round(a + b + ..., rtol=rtol)",
        prepare=_trains,
        exact=True,
    ),
    Entry(
        "teneva",
        "teneva:add_many",
        lambda add_many, many, case: add_many(many.a, e=case.rtol / 10, trunc_freq=4),
        unchanged,
        "add_many(trains, e=rtol / 10, trunc_freq=4); rounds after every fourth term",
        exact=True,
    ),
    Entry(
        "torchTT",
        "torchtt:TT",
        lambda _, trains, case: _sum(trains).round(eps=case.rtol),
        lambda train: train.cores,
        "(a + b + ...).round(eps=rtol)",
        prepare=lambda many, case: [torch_train(cores, case) for cores in many.a],
        exact=True,
    ),
)

# ---- how often a function is asked


@dataclass(frozen=True)
class Subject:
    """A function that can be asked anywhere, and a tolerance."""

    name: str
    f: Function
    shape: tuple[int, ...]
    rtol: float
    entrywise: bool = False  # the error over all entries instead of uniform indices


def digits(points: np.ndarray) -> np.ndarray:
    """The numbers in [0, 1) of which the indices are the binary digits."""
    return points @ 0.5 ** np.arange(1.0, points.shape[1] + 1)


def _pole(points: np.ndarray) -> np.ndarray:
    return 1 / (1.0 + points.sum(axis=1))


def _peaks(points: np.ndarray) -> np.ndarray:
    x = digits(points)
    return sum(
        a * np.exp(-(((x - c) / w) ** 2) / 2) for a, c, w in ((1, 0.3, 1e-2), (0.5, 0.71, 3e-2), (2, 0.11, 5e-3))
    )


def _plane(points: np.ndarray) -> np.ndarray:
    x, y = digits(points[:, ::2]), digits(points[:, 1::2])
    return np.exp(-20 * (x - y) ** 2) * np.cos(8 * x * y) + 1 / (0.01 + x**2 + y**2)


def _rank_ten(d: int) -> Function:
    generator = np.random.default_rng(0)
    cores = [generator.standard_normal((10 if k else 1, 2, 10 if k < d - 1 else 1)) / math.sqrt(20) for k in range(d)]
    return lambda points: entries(cores, points)


def entries(cores: Sequence[np.ndarray], points: np.ndarray) -> np.ndarray:
    rows = np.ones((len(points), 1))
    for core, leg in zip(cores, points.T, strict=True):
        rows = np.einsum("ml,lmr->mr", rows, core[:, leg])
    return rows[:, 0]


def _deltas(shape: tuple[int, ...], count: int) -> Function:
    """One at `count` random indices, zero elsewhere."""
    places = np.random.default_rng(0).choice(math.prod(shape), count, replace=False)
    return lambda points: np.isin(np.ravel_multi_index(tuple(points.T), shape), places).astype(float)


def _ghz(points: np.ndarray) -> np.ndarray:
    return (points == points[:, :1]).all(axis=1).astype(float)


def _sum_is(total: int) -> Function:
    return lambda points: (points.sum(axis=1) == total).astype(float)


SUBJECTS = (
    Subject("1/(1 + i + j + ...), 20^5", _pole, (20,) * 5, 1e-6),
    Subject("1/(1 + i + j + ...), 20^5", _pole, (20,) * 5, 1e-10),
    Subject("1/(1 + i + j + ...), 10^12", _pole, (10,) * 12, 1e-8),
    Subject("sine of 100 binary digits", lambda points: np.sin(20 * digits(points) + 0.3), (2,) * 100, 1e-10),
    Subject("three peaks, 50 binary digits", _peaks, (2,) * 50, 1e-6),
    Subject("two variables, 15 binary digits each", _plane, (2,) * 30, 1e-6),
    Subject("train of rank 10, 2^40", _rank_ten(40), (2,) * 40, 1e-8),
    # Features that few random indices meet.
    Subject("one entry of 30^3", _deltas((30,) * 3, 1), (30,) * 3, 1e-6, entrywise=True),
    Subject("five entries of 30^3", _deltas((30,) * 3, 5), (30,) * 3, 1e-6, entrywise=True),
    Subject("five entries of 16^5", _deltas((16,) * 5, 5), (16,) * 5, 1e-6, entrywise=True),
    Subject("i + j + ... = 40, 16^5", _sum_is(40), (16,) * 5, 1e-6, entrywise=True),
    Subject("i = j = ..., 8^4", _ghz, (8,) * 4, 1e-6, entrywise=True),
    Subject("i = j = ..., 16^5", _ghz, (16,) * 5, 1e-6, entrywise=True),
)
SOLVERS = {"tnlib": tnlib_cross, "teneva": teneva_cross, "torchTT": torch_cross}


def table() -> Iterator[str]:
    """Yield one line per function and library: points asked for, relative error, largest rank, seconds.

    A library that fails on a function, as some do where it is zero at their first points, has its exception there.
    """
    yield "| function | rtol | library | points | error | largest rank | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for subject in SUBJECTS:
        for entry in CROSS:
            if entry.missing():
                continue
            asked: set[bytes] = set()

            def counted(points: np.ndarray, subject: Subject = subject, asked: set[bytes] = asked) -> np.ndarray:
                asked.update(map(bytes, np.ascontiguousarray(points, np.uint8)))
                return subject.f(points)

            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    result = SOLVERS[entry.name](entry.function(), counted, subject.shape, subject.rtol)
                    cores = entry.as_arrays(result)
                except (ValueError, ArithmeticError, RuntimeError, np.linalg.LinAlgError) as problem:
                    failed = f"{len(asked):,} | {type(problem).__name__} | | |"
                    yield f"| {subject.name} | {subject.rtol:.0e} | {entry.name} | {failed}"
                    continue
            seconds = time.perf_counter() - start
            points = _test_points(subject)
            want = subject.f(points)
            error = np.linalg.norm(entries(cores, points) - want) / np.linalg.norm(want)
            rank = max(len(core) for core in cores)
            yield (
                f"| {subject.name} | {subject.rtol:.0e} | {entry.name} | {len(asked):,} | {error:.1e} | {rank} | "
                f"{seconds:.1f} |"
            )


def _test_points(subject: Subject) -> np.ndarray:
    if subject.entrywise:
        return np.stack(np.unravel_index(np.arange(math.prod(subject.shape)), subject.shape), axis=1)
    generator = np.random.default_rng(1)
    return np.stack([generator.integers(0, n, 200_000) for n in subject.shape], axis=1)


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
