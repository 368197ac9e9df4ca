"""Timed cases of the gate, by name, and the process that times them with the library of one tree.

The file is run by its path, with PYTHONPATH naming the tree, so that two versions of the library run the same cases.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tnlib_adapters import builtin_path, open_checkpoint
from tnlib_adapters.reference.model import run

import tnlib

Case = Callable[[], object]


def low_rank(shape: tuple[int, ...], rank: int, noise: float = 1e-6) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = tnlib.Tucker(rng.standard_normal((rank,) * len(shape)), [rng.standard_normal((n, rank)) for n in shape]).full()
    return np.asarray(x / np.linalg.norm(x) + noise * rng.standard_normal(shape) / np.sqrt(x.size))


def train(d: int, n: int, rank: int, seed: int = 0) -> tnlib.TensorTrain:
    return tnlib.random.tensor_train((n,) * d, rank, rng=seed)


def save_and_load(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tnlib.save(Path(folder) / "x.safetensors", value)
        tnlib.load(Path(folder) / "x.safetensors")


def reciprocal(points: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + points.sum(axis=1))


def everyday() -> dict[str, Case]:
    x, a = low_rank((8, 9, 10), 3), low_rank((100, 80), 10)
    first, second = train(20, 4, 8), train(20, 4, 8, seed=1)
    model = open_checkpoint(builtin_path())
    attention = model.attention(1)
    points = np.random.default_rng(0).integers(0, 4, (1000, 20))
    return {
        "svd of 100 x 80": lambda: tnlib.svd(a, rtol=1e-3),
        "tt_svd of 8 x 9 x 10": lambda: tnlib.tt_svd(x, rtol=1e-3),
        "tucker of 8 x 9 x 10": lambda: tnlib.tucker(x, rtol=1e-3),
        "cp of 8 x 9 x 10": lambda: tnlib.cp(x, 3, rtol=0.5),
        "sum, rounded": lambda: tnlib.round(first + second, rtol=1e-6),
        "inner product": lambda: tnlib.inner(first, second),
        "canonical form": lambda: tnlib.canonicalize(first, 10),
        "1000 entries": lambda: tnlib.entries(first, points),
        "save and load": partial(save_and_load, first),
        "open a checkpoint": lambda: open_checkpoint(builtin_path()).attention(0),
        "QK and OV circuits": lambda: (attention.qk(0), attention.ov(0)),
        "forward pass of 32 tokens": lambda: run(model, np.arange(32)[None] % 16),
    }


def large() -> dict[str, Case]:
    x, a = low_rank((48,) * 4, 6), low_rank((2000, 1000), 40)
    cube, sum_of_trains = low_rank((120,) * 3, 8), train(40, 4, 48) + train(40, 4, 48, seed=1)
    return {
        "tt_svd of 48^4": lambda: tnlib.tt_svd(x, rtol=1e-3),
        "svd of 2000 x 1000, rank 20": lambda: tnlib.svd(a, max_rank=20),
        "tucker of 120^3": lambda: tnlib.tucker(cube, rtol=1e-3),
        "sum of rank 96, rounded": lambda: tnlib.round(sum_of_trains, max_rank=48),
        "tt_cross of 12^8": lambda: tnlib.tt_cross(reciprocal, (12,) * 8, rtol=1e-6),
    }


@cache
def cases() -> dict[str, Case]:
    return everyday() | large()


@cache
def warm(name: str) -> Case:
    """Return a case after its first call, which imports and compiles."""
    case = cases()[name]
    case()
    return case


def seconds(case: Case, least: float = 0.02) -> float:
    """Return the time of one call, the smallest of three, each of as many calls as take `least` seconds."""
    start = time.perf_counter()
    case()
    count = max(1, int(least / max(time.perf_counter() - start, 1e-9)))
    times = []
    for _ in range(3 if count > 1 else 1):
        start = time.perf_counter()
        for _ in range(count):
            case()
        times.append((time.perf_counter() - start) / count)
    return min(times)


def serve() -> None:
    """Answer each line of stdin, the name of a case, with its time as a line of JSON."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        sys.stdout.write(json.dumps(seconds(warm(line.rstrip("\n")))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
