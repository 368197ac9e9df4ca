"""The commands `tnlib decompose` and `tnlib info`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracles
import pytest
from command_line import run_command

import tnlib


@pytest.mark.parametrize("kind", ["tt", "tucker", "svd", "cp"])
def test_files_of_numpy(kind: str, tmp_path: Path) -> None:
    x = oracles.random_cp((4000, 30) if kind == "svd" else (20, 30, 40), 2)
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "out.safetensors"
    limit = ("--rank", 2) if kind == "cp" else ("--rtol", 1e-6)
    command = ("decompose", tmp_path / "x.npy", out, "--format", kind, *limit)
    assert "certified" in run_command(*command, "--memory", "400K").output
    assert oracles.true_error(x, tnlib.load(out)) <= 1e-6
    assert "ranks" in run_command("info", out).output
    assert "--force" in run_command(*command, status=2).output


def test_files_of_hdf5_and_zarr(tmp_path: Path) -> None:
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    x = oracles.random_cp((20, 30, 40), 2)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/b"] = x
    zarr.create_array(str(tmp_path / "x.zarr"), shape=x.shape, chunks=(10, 10, 10), dtype="f8")[...] = x
    for k, name in enumerate((f"{tmp_path / 'x.h5'}:/a/b", tmp_path / "x.zarr")):
        out = tmp_path / f"{k}.safetensors"
        run_command("decompose", name, out, "--rtol", 1e-6, "--memory", "400K")
        assert oracles.true_error(x, tnlib.load(out)) <= 1e-6
        assert "20 x 30 x 40" in run_command("info", name).output
    assert "/a/b" in run_command("decompose", tmp_path / "x.h5", tmp_path / "new", status=2).output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01\x00", b"text"])
def test_files_that_are_none(content: bytes | None, tmp_path: Path) -> None:
    for suffix in ("npy", "h5", "zarr", "txt"):
        path = tmp_path / f"x.{suffix}"
        if content is not None:
            path.write_bytes(content)
        for command in (("info", path), ("decompose", path, tmp_path / "out")):
            text = run_command(*command, status=2).output
            assert text.startswith("Error: ")
            assert "Traceback" not in text
    assert not (tmp_path / "out").exists()
