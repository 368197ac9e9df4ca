"""Decompositions of Dask arrays, in this process and by worker processes: the contract, bits, and what is refused."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import out_of_core_cases
import pytest
from out_of_core_cases import CALLS, TENSORS

import tnlib
from tnlib import Storage
from tnlib.out_of_core.passes import observed_passes

distributed = pytest.importorskip("distributed")
da = pytest.importorskip("dask.array")

MEMORY = 1 << 22  # bytes; tiles of 256 KiB
SHAPE = (40, 24, 30, 8)
noisy, paired = partial(out_of_core_cases.noisy, shape=SHAPE), partial(out_of_core_cases.paired, 480)


def check(name: str, x: np.ndarray, stored: Any, *, memory: int = MEMORY, client: Any = None, **options: Any) -> Any:
    return out_of_core_cases.check(name, x, stored, Storage(memory=memory, client=client), **options)


def cluster_of(n_workers: int, folder: Path) -> Any:
    return distributed.LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        processes=True,
        memory_limit=0,
        dashboard_address="127.0.0.1:0",
        local_directory=str(folder),
        silence_logs=logging.CRITICAL,
    )


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A worker process, started again when it dies."""
    with cluster_of(1, tmp_path_factory.mktemp("workers")) as cluster:
        yield cluster


@pytest.fixture
def client(workers: Any) -> Iterator[Any]:
    with distributed.Client(workers, set_as_default=False) as client:
        yield client


CHUNKS = [
    *((40, 24, 5, 4), ((3, 9, 20, 8), (24,), (7, 15, 8), (8,))),
    *(pytest.param(chunks, marks=pytest.mark.slow) for chunks in ((5, 24, 30, 8), (10, 6, 15, 8))),
]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("name", TENSORS)
def test_any_chunks_in_this_process(name: str, chunks: Any) -> None:
    x = noisy()
    a = da.from_array(x, chunks=chunks)
    for options in ({"rtol": 1e-2}, {"max_rank": 2}, {"rtol": 1e-6, "max_rank": 3}):
        check(name, x, a, **options)


@pytest.mark.parametrize("chunks", [(120, 120), (20, 480), (480, 8), (40, 96), ((100, 380), 480)], ids=str)
def test_chunks_of_matrices_are_joined_to_legs(chunks: Any) -> None:
    x = paired()
    for options in ({"rtol": 1e-2}, {"max_rank": 2}):
        check("ttm_svd", x, da.from_array(x, chunks=chunks), memory=1 << 23, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORS)
def test_workers_keep_the_contract(name: str, client: Any) -> None:
    for dtype, noise in ((np.float64, 1e-12), (np.complex64, 1e-3)):
        x = noisy(dtype, noise)
        a = da.from_array(x, chunks=(10, 12, 30, 8))
        for options in ({"rtol": 1e-2}, {"rtol": max(1e-11, 3 * noise)}, {"max_rank": 2}):
            check(name, x, a, client=client, **options)


def bits(fit: Any) -> list[bytes]:
    return [np.ascontiguousarray(a).tobytes() for a in fit.value.arrays()] + [np.float64(fit.error).tobytes()]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(5, 12, 30, 8), (20, 24, 10, 8)], ids=str)
def test_any_number_of_workers_gives_the_same_bits(chunks: tuple[int, ...], tmp_path: Path) -> None:
    a, matrix = da.from_array(noisy(noise=1e-8), chunks=chunks), da.from_array(paired(), chunks=(80, 160))
    results = []
    for n_workers in (1, 2, 4):
        with cluster_of(n_workers, tmp_path) as cluster, distributed.Client(cluster, set_as_default=False) as client:
            storage = Storage(memory=2 * MEMORY, client=client)
            results.append([
                bits(CALLS[name](matrix if name == "ttm_svd" else a, rtol=rtol, storage=storage))
                for name in CALLS for rtol in (1e-2, 1e-6) if name != "ttm_svd" or rtol == 1e-2
            ])  # fmt: skip
    assert results[0] == results[1] == results[2]


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of two processes, started again when they die, and its client."""
    folder = tmp_path_factory.mktemp("two")
    with cluster_of(2, folder) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        yield cluster, client


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("name", TENSORS)
def test_a_killed_worker_changes_no_bit(name: str, at: int, two_workers: Any) -> None:
    workers, client = two_workers
    a = da.from_array(noisy(noise=1e-8), chunks=(5, 12, 30, 8))
    options = {"rtol": 1e-6, "storage": Storage(memory=MEMORY, client=client)}
    want = bits(CALLS[name](a, **options))
    calls = iter(range(at))
    killed: list[int] = []

    def kill(stage: str, done: int, total: int) -> None:
        if next(calls, None) is None and not killed:
            killed.append(next(iter(workers.workers.values())).pid)
            os.kill(killed[0], signal.SIGKILL)

    with observed_passes(kill):
        fit = CALLS[name](a, **options)
    assert killed
    assert bits(fit) == want
    client.wait_for_workers(2, timeout=120)


def in_another_process(block: np.ndarray, pid: int) -> np.ndarray:
    if os.getpid() == pid:
        raise RuntimeError("computed in the calling process")
    return block


@pytest.mark.slow
def test_the_current_client_computes_dask_arrays(client: Any) -> None:
    x = noisy()
    a = da.from_array(x, chunks=(5, 24, 30, 8)).map_blocks(in_another_process, os.getpid(), dtype=x.dtype)
    with client.as_current():
        fit = check("tucker", x, a, rtol=1e-2)
    assert bits(fit) == bits(check("tucker", x, a, rtol=1e-2, client=client))
    with pytest.raises(RuntimeError, match="in the calling process"):
        tnlib.tucker(a, rtol=1e-2, storage=Storage(memory=MEMORY))
    small = da.from_array(x[:2], chunks=(1, 24, 30, 8)).map_blocks(in_another_process, os.getpid(), dtype=x.dtype)
    check("tucker", x[:2], small, rtol=1e-2, client=client)


@pytest.mark.slow
def test_small_chunks_are_merged(client: Any) -> None:
    x = noisy()
    totals = set()
    with observed_passes(lambda stage, done, total: totals.add(total)):
        check("svd", x, da.from_array(x, chunks=(2, 24, 30, 2)), client=client, rtol=1e-2)
    assert max(totals) <= x.nbytes / (MEMORY / 16)


@pytest.mark.slow
def test_files_are_opened_by_workers(client: Any, tmp_path: Path) -> None:
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    x, matrix, run = noisy(), paired(), partial(check, client=client, rtol=1e-2)
    np.save(tmp_path / "transposed.npy", x.transpose(2, 0, 3, 1))
    np.save(tmp_path / "big-endian.npy", x.astype(">f8"))
    run("tt_svd", x, np.load(tmp_path / "transposed.npy", mmap_mode="r").transpose(1, 3, 0, 2))
    run("tt_svd", x, np.load(tmp_path / "big-endian.npy", mmap_mode="r"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["folder/x"], file["folder/matrix"] = x, matrix
    with h5py.File(tmp_path / "x.h5", "r") as file:
        run("tucker", x, file["folder/x"])
        run("ttm_svd", matrix, file["folder/matrix"], memory=1 << 20)
    a = zarr.create_array(str(tmp_path / "x.zarr"), shape=SHAPE, chunks=(10, 24, 30, 8), dtype="f8")
    a[...] = x
    run("tucker", x, a)


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.slow
def test_nan_is_named_by_its_chunk(client: Any) -> None:
    x = noisy()
    x[17, 3, 2, 1] = np.nan
    a = da.from_array(x, chunks=(5, 24, 30, 8))
    for name in TENSORS:
        with oracles.refused(ValueError, name, "finite", "chunk [15:20, 0:24, 0:30, 0:8]", "nan"):
            CALLS[name](a, rtol=1e-2, storage=Storage(memory=MEMORY, client=client))


def test_chunks_that_do_not_join() -> None:
    a = da.from_array(noisy(), chunks=(5, 24, 30, 8))
    with oracles.refused(ValueError, "svd", "chunks", "legs (0,) whole", "a.rechunk({0: -1, 1: 'auto'"):
        tnlib.svd(a, left=0, max_rank=2, storage=Storage(memory=MEMORY // 2))
    with oracles.refused(ValueError, "ttm_svd", "chunks", "a.rechunk((20, 8))"):
        CALLS["ttm_svd"](da.from_array(paired(), chunks=(240, 480)), max_rank=2, storage=Storage(memory=MEMORY))


def test_arrays_and_clients_that_cannot_be_used(client: Any, tmp_path: Path) -> None:
    x = noisy()
    a = da.from_array(x, chunks=(5, 24, 30, 8))
    with oracles.refused(TypeError, "Storage", "client", "distributed.Client", "str"):
        Storage(client="tcp://127.0.0.1:8786")
    storage = Storage(memory=MEMORY, client=client)
    with oracles.refused(ValueError, "tucker", "ndarray in memory", "leave client out"):
        tnlib.tucker(x, storage=storage)
    unknown = a.reshape(-1)[da.from_array(x.reshape(-1), chunks=-1) > 0]
    with oracles.refused(ValueError, "svd", "a.compute_chunk_sizes()"):
        tnlib.svd(unknown, storage=storage)
    with oracles.refused(ValueError, "tucker", "n_iter"):
        tnlib.tucker(a, max_rank=2, n_iter=1, storage=storage)
    np.save(tmp_path / "x.npy", x)
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    with oracles.refused(ValueError, "tucker", "mode='r'"):
        tnlib.tucker(changed, max_rank=2, storage=storage)
    opened = OpenedHere(x)
    with oracles.refused(ValueError, "tucker", "workers can open", "pickle"):
        tnlib.tucker(opened, max_rank=2, storage=storage)


class OpenedHere:
    """An array that no other process can open."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape, self.dtype, self.frame = x, x.shape, x.dtype, sys._getframe()

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.x[index]


@pytest.mark.slow
def test_errors_of_chunks_are_raised_here(client: Any) -> None:
    a = da.from_array(noisy(), chunks=(5, 24, 30, 8)).map_blocks(failing, dtype=float)
    with pytest.raises(KeyError, match="no such tape"):
        tnlib.tucker(a, rtol=1e-2, storage=Storage(memory=MEMORY, client=client))


def failing(block: np.ndarray) -> np.ndarray:
    raise KeyError("no such tape")


@pytest.mark.slow
def test_a_cluster_that_goes_away_is_one_sentence(tmp_path: Path) -> None:
    a = da.from_array(noisy(), chunks=(5, 12, 30, 8))
    with cluster_of(1, tmp_path) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        storage = Storage(memory=MEMORY, folder=tmp_path / "run", client=client)
        want = tnlib.tucker(a, rtol=1e-2, storage=storage)

        def close(stage: str, done: int, total: int) -> None:
            if stage == "pass 2":
                cluster.close()

        with observed_passes(close), oracles.refused(RuntimeError, "tucker", "must stay until the end", "repeat"):
            tnlib.tucker(a, rtol=1e-2, storage=storage)
    stages = set()
    with (
        cluster_of(1, tmp_path) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        observed_passes(lambda stage, done, total: stages.add(stage)),
    ):
        fit = tnlib.tucker(a, rtol=1e-2, storage=replace(storage, client=client))
    assert bits(fit) == bits(want)
    assert "pass 1" not in stages
    assert not (tmp_path / "run").exists()
