"""tt_svd of a Dask array by one and two worker processes, and Dask's own randomized SVD of the first unfolding."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import tnlib

SHAPES = {"full": (128, 128, 128, 64), "small": (32, 32, 32, 16)}
RANK, NOISE, RTOL = 16, 1e-4, 1e-3
CHUNKS = 16
REPETITIONS = {"full": 3, "small": 1}


def measure(scale: str) -> dict[str, Any]:
    """Return the seconds of all contenders, the best of several, and the errors."""
    shape = SHAPES[scale]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "x.bin"
        norm = write_array(path, shape)
        seconds: dict[str, list[float]] = {}
        errors: dict[str, float] = {}
        for _ in range(REPETITIONS[scale]):
            for n_workers in (1, 2):
                with workers(n_workers, scratch) as client:
                    runs = contenders(path, shape, norm, client)
                    for _ in range(2):
                        runs["tt_svd"]()  # loads and compiles in every worker
                    for name in runs if n_workers == 2 else ("tt_svd",):
                        key = f"{name}, {n_workers} worker{'s' if n_workers > 1 else ''}"
                        start = time.perf_counter()
                        errors[key] = runs[name]()
                        seconds.setdefault(key, []).append(time.perf_counter() - start)
    return {"shape": shape, "bytes": 8 * int(np.prod(shape)), "seconds": seconds, "errors": errors}


@contextmanager
def workers(count: int, scratch: str) -> Iterator[Any]:
    """Yield a client of processes of one thread."""
    import distributed

    environment = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with distributed.LocalCluster(
        n_workers=count, threads_per_worker=1, processes=True, memory_limit=0, dashboard_address="127.0.0.1:0",
        local_directory=scratch, silence_logs=logging.CRITICAL, env=environment,
    ) as cluster, distributed.Client(cluster, set_as_default=False) as client:  # fmt: skip
        yield client


def write_array(path: Path, shape: tuple[int, ...]) -> float:
    """Write a train of rank 16 plus normally distributed noise, slab by slab, and return its norm."""
    rng = np.random.default_rng(0)
    train = tnlib.random.tensor_train(shape, RANK, rng=rng)
    unit = NOISE * train.norm() / np.sqrt(np.prod(shape, dtype=float))
    first, *others = train.cores
    square = 0.0
    with path.open("wb") as out:
        for rows in np.array_split(first[0], CHUNKS):
            slab = rows[None]
            for core in others:
                slab = np.tensordot(slab, core, 1)
            slab = np.exp(train.log_scale) * slab[0, ..., 0]
            slab += unit * rng.standard_normal(slab.shape)
            square += np.linalg.norm(slab) ** 2
            slab.tofile(out)
    return float(np.sqrt(square))


def read_slab(path: str, shape: tuple[int, ...], k: int) -> np.ndarray:
    count = int(np.prod(shape))
    return np.fromfile(path, np.float64, count, offset=8 * count * k).reshape(shape)


def dask_array(path: Path, shape: tuple[int, ...]) -> Any:
    import dask
    import dask.array

    slab = (shape[0] // CHUNKS, *shape[1:])
    parts = [dask.delayed(read_slab)(os.fspath(path), slab, k) for k in range(CHUNKS)]
    return dask.array.concatenate([dask.array.from_delayed(part, slab, np.float64) for part in parts])


def contenders(path: Path, shape: tuple[int, ...], norm: float, client: Any) -> dict[str, Callable[[], float]]:
    import dask.array

    x = dask_array(path, shape)
    matrix = x.reshape(shape[0], -1)

    def compressed(**options: Any) -> float:
        _, singular_values, _ = client.compute(
            dask.array.linalg.svd_compressed(matrix, RANK, seed=0, **options), sync=True
        )
        return float(np.sqrt(norm**2 - singular_values @ singular_values)) / norm  # of an orthogonal projection

    return {
        "tt_svd": lambda: tnlib.tt_svd(x, rtol=RTOL, storage=tnlib.Storage(client=client)).error,
        "svd_compressed": compressed,
        "svd_compressed, 1 power iteration": lambda: compressed(n_power_iter=1),
    }
