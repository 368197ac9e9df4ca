"""Decompositions of arrays that are read by tiles: the contract, storages, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import out_of_core_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st
from out_of_core_cases import CALLS, SHAPE, TENSORS, noisy, paired
from slow_cases import mostly_slow

import tnlib
from tnlib import Storage

MEMORY = 1 << 20  # bytes
LIMITED, HALF, QUARTER = (Storage(memory=MEMORY // n) for n in (1, 2, 4))
check = partial(out_of_core_cases.check, storage=LIMITED)


@oracles.each_dtype
@pytest.mark.parametrize("name", TENSORS)
def test_the_contract_holds_for_every_dtype(name: str, dtype: np.dtype) -> None:
    x = noisy(dtype)
    for options in ({"rtol": 1e-2}, {"max_rank": 2}, {"rtol": 1e-2, "max_rank": 3}):
        fit = check(name, x, x, **options)
        assert fit.value.n_parameters < 0.2 * x.size


@pytest.mark.slow
@given(
    noise=st.sampled_from([0.0, 1e-13, 1e-9, 1e-5, 1e-2]),
    rtol=st.sampled_from([1e-13, 1e-11, 1e-8, 1e-6, 1e-3, 0.1]),
    seed=st.integers(0, 100),
    name=st.sampled_from(TENSORS),
)
def test_tolerances_down_to_roundoff(noise: float, rtol: float, seed: int, name: str) -> None:
    x = noisy(noise=noise, seed=seed, shape=(16, 18, 60, 8))
    if rtol <= noise:
        rtol = 3 * noise
    check(name, x, x, rtol=rtol)


@pytest.mark.parametrize("c", [1e-300, 1e-200, 1e-100, 1e100, 1e200, 1e300])
@pytest.mark.parametrize("name", TENSORS)
def test_ranks_are_free_of_scale(name: str, c: float) -> None:
    x = noisy()
    fit, scaled = check(name, x, x, rtol=1e-2), check(name, c * x, c * x, rtol=1e-2)
    assert scaled.value.ranks == fit.value.ranks
    assert scaled.error == pytest.approx(fit.error, rel=0.01)


@pytest.mark.parametrize("name", ["tt_svd", "tucker"])
def test_tiles_of_very_different_scale(name: str) -> None:
    x = np.zeros(SHAPE)
    x[:4] = 1e-180 * noisy(shape=(4, *SHAPE[1:]))
    x[-3:] = 1e180 * noisy(shape=(3, *SHAPE[1:]), seed=3)
    check(name, x, x, rtol=1e-2)
    check(name, x[:17].copy(), x[:17].copy(), rtol=1e-2)
    check(name, np.zeros(SHAPE), np.zeros(SHAPE), rtol=1e-2)


@pytest.mark.parametrize("options", [{"rtol": 0.01}, {"max_rank": 2}], ids=str)
def test_matrices_with_paired_legs(options: dict[str, Any], tmp_path: Path) -> None:
    x = paired(240)
    want = tnlib.ttm_svd(x, (4, 6, 20), (5, 6, 8), **options)
    h5py = pytest.importorskip("h5py")
    np.save(tmp_path / "x.npy", x)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = x
        for stored in (np.load(tmp_path / "x.npy", mmap_mode="r"), file["x"]):
            fit = check("ttm_svd", x, stored, **options)
            assert fit.value.ranks == want.value.ranks


def test_cp_of_an_array_past_memory() -> None:
    x = oracles.random_cp(SHAPE, 3) + 1e-3 * oracles.normal(SHAPE) / 340
    fit = tnlib.cp(x, 3, storage=HALF)
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert fit.error < 1e-3
    with oracles.refused(ValueError, "constraint", "memory"):
        tnlib.cp(np.abs(x), 3, constraint="nonnegative", storage=HALF)


# ---------------------------------------------------------------------------------------------------------- storages


class Sliced:
    """Anything with shape, dtype and slicing; counts the entries that are read."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape, self.dtype, self.n_read = x, x.shape, x.dtype, 0

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self.x[index]
        self.n_read += part.size
        return part


def layouts(x: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """Memory-mapped files of `x` in several layouts."""
    larger = np.full([2 * n for n in x.shape], np.nan, x.dtype)
    larger[::2, 1::2, : x.shape[2], ::2] = x
    for name, a in (("C", x), ("F", np.asfortranarray(x)), ("larger", larger)):
        np.save(folder / f"{name}.npy", a)
    np.save(folder / "big-endian.npy", x.astype(x.dtype.newbyteorder(">")))
    np.save(folder / "transposed.npy", x.transpose(2, 0, 3, 1))
    return {
        "C": np.load(folder / "C.npy", mmap_mode="r"),
        "Fortran": np.load(folder / "F.npy", mmap_mode="r"),
        "strided": np.load(folder / "larger.npy", mmap_mode="r")[::2, 1::2, : x.shape[2], ::2],
        "transposed": np.load(folder / "transposed.npy", mmap_mode="r").transpose(1, 3, 0, 2),
        "big-endian": np.load(folder / "big-endian.npy", mmap_mode="r"),
        "writable": np.load(folder / "C.npy", mmap_mode="r+"),
        "reversed": np.load(folder / "C.npy", mmap_mode="r")[::-1],
    }


@pytest.mark.parametrize("name", TENSORS)
def test_every_layout_of_a_mapped_file(name: str, tmp_path: Path) -> None:
    x = noisy()
    want = CALLS[name](x, rtol=1e-2)
    for layout, a in layouts(x, tmp_path).items():
        dense = x[::-1] if layout == "reversed" else x
        fit = check(name, dense, a, rtol=1e-2)
        if layout != "reversed":
            assert fit.value.ranks == want.value.ranks, layout


def test_changes_of_a_private_map_are_read(tmp_path: Path) -> None:
    x = noisy()
    np.save(tmp_path / "x.npy", x)
    a = np.load(tmp_path / "x.npy", mmap_mode="c")
    a[3] += 1
    changed = np.array(a)
    check("tt_svd", changed, a, rtol=1e-2)
    np.testing.assert_array_equal(a, changed)


@pytest.mark.parametrize("name", mostly_slow(TENSORS, ["tt_svd"]))
def test_hdf5_datasets_and_zarr_arrays(name: str, tmp_path: Path) -> None:
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    x = noisy()
    for chunks in (SHAPE, (7, 5, 11, 8)):
        check(name, x, zarr.create_array(str(tmp_path / f"{chunks[0]}.zarr"), data=x, chunks=chunks), rtol=1e-2)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["contiguous"] = x
        file.create_dataset("chunked", data=x, chunks=(6, 6, 6, 6), compression="gzip")
        file["integers"] = np.round(1e6 * x).astype(np.int32)
        for key in file:
            check(name, file[key][...], file[key], rtol=1e-2)


def test_two_reads_of_an_array_of_low_ranks() -> None:
    x = oracles.random_train((2,) * 18, [1, *[2] * 17, 1]) + 1e-4 * oracles.normal((2,) * 18) / 512
    stored = Sliced(x)
    fit = tnlib.tt_svd(stored, rtol=1e-2, storage=LIMITED)
    oracles.assert_fit(fit, x, rtol=1e-2)
    assert stored.n_read < 2.5 * x.size  # and a sample of rows
    tucker = Sliced(noisy())
    tnlib.tucker(tucker, rtol=1e-2, storage=LIMITED)
    assert tucker.n_read == 2 * tucker.x.size


def test_small_arrays_take_the_way_of_arrays_in_memory(tmp_path: Path) -> None:
    x = noisy()
    np.save(tmp_path / "x.npy", x)
    a = np.load(tmp_path / "x.npy", mmap_mode="r")
    for name in TENSORS:
        oracles.assert_same_bits(CALLS[name](a, rtol=1e-2).value, CALLS[name](x, rtol=1e-2).value)


def test_repetition_does_not_change_a_bit() -> None:
    x = noisy()
    for name in TENSORS:
        first, second = (CALLS[name](x, rtol=1e-2, storage=LIMITED) for _ in range(2))
        oracles.assert_same_bits(first.value, second.value)
        assert first.error == second.error


# ----------------------------------------------------------------------------------------------------------- refusals


def test_nan_is_named_by_its_chunk() -> None:
    for value in (np.nan, np.inf):
        x = noisy()
        x[17, 3, 2, 1] = value
        for name in TENSORS:
            with oracles.refused(ValueError, name, "finite", "chunk [", str(value)):
                CALLS[name](x, rtol=1e-2, storage=LIMITED)


@pytest.mark.parametrize("memory", [-1, 0, 1000, float("nan"), float("inf")])
def test_impossible_memory(memory: float) -> None:
    with oracles.refused(ValueError, "Storage", "memory", "65536"):
        Storage(memory=memory)


def test_settings_of_other_types() -> None:
    with oracles.refused(TypeError, "tt_svd", "storage must be a tnlib.Storage", str(MEMORY)):
        tnlib.tt_svd(noisy(), storage=MEMORY)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "Storage", "folder must be a path"):
        Storage(folder=3)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "Storage", "one_pass must be True or False"):
        Storage(one_pass="yes")  # type: ignore[arg-type]
    for option in ({"folder": "folder"}, {"client": object()}):
        with oracles.refused((ValueError, TypeError), "Storage", *option):
            Storage(one_pass=True, **option)  # type: ignore[arg-type]


def test_memory_that_does_not_suffice() -> None:
    x = oracles.normal(SHAPE)
    with oracles.refused(ValueError, "tt_svd", "raise rtol"):
        tnlib.tt_svd(x, rtol=1e-6, storage=QUARTER)
    with oracles.refused(ValueError, "tucker", "memory"):
        tnlib.tucker(x, rtol=1e-6, storage=QUARTER)
    with oracles.refused(ValueError, "svd", "memory", "Gram"):
        tnlib.svd(x.reshape(480, 240), rtol=1e-6, storage=QUARTER)
    with oracles.refused(ValueError, "tucker", "n_iter"):
        tnlib.tucker(x, max_rank=2, n_iter=1, storage=QUARTER)
    with oracles.refused(ValueError, "tucker", "init must be given with n_iter"):
        tnlib.tucker(x, rtol=0.1, init=tnlib.random.tucker(x.shape, 2, rng=0), storage=QUARTER)


def test_a_file_that_ends_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, noisy())
    a = np.load(path, mmap_mode="r")
    os.truncate(path, path.stat().st_size // 2)
    with oracles.refused(ValueError, "tt_svd", "readable to its end", "bytes"):
        tnlib.tt_svd(a, rtol=1e-2, storage=LIMITED)


class Changing(Sliced):
    """An array of which another process changes a number after the first read."""

    def __getitem__(self, index: Any) -> np.ndarray:
        if self.n_read >= self.x.size:
            self.x[11, 2, 3, 4] = 7
        return super().__getitem__(index)


def test_an_array_that_changes_in_the_middle() -> None:
    with oracles.refused(ValueError, "tucker", "must not change", "chunk ["):
        tnlib.tucker(Changing(noisy()), rtol=1e-2, storage=LIMITED)


# -------------------------------------------------------------------------------------------------------------- memory

PEAK = """
import sys, numpy as np, tnlib
from pathlib import Path
tnlib.tt_svd(np.random.default_rng(0).standard_normal((8,) * 7), rtol=0.5)  # loads the kernels
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
a = np.memmap(sys.argv[1], mode="r", dtype=float, shape=(2,) * 26)
if sys.argv[2] == "tt_svd":
    tnlib.tt_svd(a, rtol=1e-2, storage=tnlib.Storage(memory=2**26))
else:
    tnlib.tucker(a.reshape(64, 128, 8192), rtol=1e-2, storage=tnlib.Storage(memory=2**26))
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux reports peaks")
@pytest.mark.parametrize("name", ["tt_svd", "tucker"])
def test_peak_memory_stays_within_the_limit(name: str, tmp_path: Path) -> None:
    path, rng = tmp_path / "x.bin", np.random.default_rng(0)
    left = np.kron(rng.standard_normal((64, 4)), rng.standard_normal((128, 1)))
    right = rng.standard_normal((4, 1 << 13))
    with path.open("wb") as out:  # 512 MB
        for rows in np.array_split(left, 16):
            (rows @ right).tofile(out)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK, str(path), name], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1.25 * 2**26
